# Needs git, make and Python 3.11 or newer. The first target that needs packages creates .venv; later calls reuse it.
# Another Python: make PYTHON=python3.12 test

PYTHON  ?= python3
BIN     := .venv/bin
READY   := .venv/.installed
# One torch thread per notebook, two notebooks at a time: two cores without a fight over them.
WORKERS ?= 2
# Notebooks whose data cannot be had are passed by, and the reason is said.
NBTEST   = OMP_NUM_THREADS=1 "$(CURDIR)/$(BIN)/nbdev_test" --n_workers $(WORKERS) --do_print --timing \
           --skip_file_re "$$(cd "$(CURDIR)" && $(BIN)/python tests/missing_data.py)"
PYTEST  := $(BIN)/pytest tests -ra --tb=short
# Run a notebook headless, with parameters if given: what it prints appears here, the noise of kernel and papermill only
# when it fails. The library's notebooks are in nbs/, those of the studies in studies/nbs/.
run_nb   = echo '--- $(1).ipynb'; mkdir -p runs results; \
           $(BIN)/papermill --no-progress-bar --stdout-file - $(1).ipynb runs/$(notdir $(1)).ipynb $(2) \
             2> runs/$(notdir $(1)).log || { tail -n 40 runs/$(notdir $(1)).log; exit 1; }
DEMO     = runs/mbse-greedynasv2-0

.DEFAULT_GOAL := help
.PHONY: help demo tour test check accept reproduce bench pictures lab sync clean

help: ## list these targets
	@echo 'usage: make <target>'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

demo: $(READY) ## from nothing to a network on embedded data: train, search, retrain, export, reload (some 6 minutes)
	@$(call run_nb,nbs/train_supernet)
	@$(call run_nb,nbs/search,-p run_dir $(DEMO) -p n_evals 200)
	@$(call run_nb,nbs/retrain,-p arch $(DEMO)/search/arch.json -p run_dir runs/demo-network)
	@echo '--- the network in a fresh process that knows only how to predict'
	@$(BIN)/python tests/reload.py runs/demo-network/network
	@echo
	@echo 'The same with all figures: runs/train_supernet.ipynb, runs/search.ipynb, runs/retrain.ipynb (open them with `make lab`).'

tour: $(READY) ## tour the search spaces without a browser
	@$(call run_nb,nbs/explore_spaces)
	@echo
	@echo 'The same with all figures: runs/explore_spaces.ipynb (open it with `make lab`).'

test: $(READY) ## everything: notebooks in sync, every notebook's lessons, then tests/
	$(BIN)/ruff check
	$(BIN)/python tests/check_tree.py
	$(NBTEST)
	cd studies && $(NBTEST)
	$(PYTEST)

check: $(READY) ## the quick part of the tests, for everyday work
	$(BIN)/ruff check
	$(BIN)/python tests/check_tree.py
	$(NBTEST) --file_re '^[0-9]'
	cd studies && $(NBTEST) --file_re '^[0-9]'
	$(PYTEST) -m 'not slow'

accept: bench ## the long acceptance runs; what they measure goes to results/
	@$(call run_nb,studies/nbs/filter_nasbench)
	@$(call run_nb,studies/nbs/rank_of_paths)
	@$(call run_nb,studies/nbs/search_nasbench)
	$(BIN)/python tests/accept.py
	GREEDYNASV2_ACCEPT=1 $(PYTEST) -k figures_stand

reproduce: $(READY) ## the paper's claims on NAS-Bench-Macro with supernets trained on CIFAR-10: hours, resumable
	@$(call run_nb,studies/nbs/reproduce_nasbench,-p missing True)

bench: $(READY) ## side-by-side timings; leave the machine alone meanwhile
	@$(call run_nb,studies/nbs/benchmark)
	@echo
	@echo 'Numbers: results/benchmark.json. Notebook: runs/benchmark.ipynb.'

pictures: $(READY) ## photograph the widgets of a real run of MB-SE for README (minutes; needs chromium)
	GREEDYNASV2_PICTURES=$(CURDIR)/docs/img $(PYTEST) -m slow -k test_pictures

lab: $(READY) ## open JupyterLab in nbs/ (more flags: make lab ARGS=--no-browser)
	$(BIN)/jupyter lab --notebook-dir=. --preferred-dir=nbs $(ARGS)

sync: $(READY) ## clean the notebooks and write the library and the studies from them
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	cd studies && ../$(BIN)/nbdev_clean && ../$(BIN)/nbdev_export

clean: ## remove build products and caches; keeps .venv and runs/
	rm -rf build dist *.egg-info _docs _proc .pytest_cache studies/build studies/*.egg-info studies/_docs studies/_proc \
	  .ruff_cache studies/.ruff_cache
	find nbs greedynasv2 studies tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

$(READY): settings.ini setup.py constraints.txt studies/settings.ini studies/setup.py
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'greedynasv2 needs Python 3.11 or newer, and $(PYTHON) is older or missing.' \
	       'Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)'; exit 1; }
	@test -x $(BIN)/python || { echo 'Creating .venv (about 6 GB, a few minutes) ...'; $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e ./studies
	@touch $@
