"Notebooks read well, build on each other in order, and run through papermill from any folder."
import json
import re

import pytest

from conftest import ROOT, run_notebook

NEED_MACRO = 'filter_nasbench', 'rank_of_paths', 'search_nasbench'
FOLDERS = dict(greedynasv2=ROOT, greedynasv2_studies=ROOT/'studies')      # package -> folder of its settings.ini
LIBRARY = [nb for folder in FOLDERS.values() for nb in sorted((folder/'nbs').glob('[0-9]*.ipynb'))]


def code_cells(path):
    "The source of every code cell of a notebook."
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [''.join(c['source']) for c in cells if c['cell_type'] == 'code']


def n_lines(source):
    "Lines of code and comments; blank ones and nbdev's directives don't count."
    return sum(bool(line.strip()) and not line.startswith('#|') for line in source.splitlines())


def test_exported_cells_hold_one_idea():
    "No exported cell has more than 60 lines. code_measures.py says how much a line holds: packed lines read worse."
    lengths = {(nb.name, source): n_lines(source) for nb in LIBRARY for source in code_cells(nb)
               if re.search(r'^#\|\s*export', source, re.M)}
    assert lengths, 'no notebook exports anything'
    long = [f'{name}, {n} lines: {source[:60]!r}' for (name, source), n in lengths.items() if n > 60]
    assert not long, '\n'.join(long)


@pytest.mark.slow
@pytest.mark.parametrize('name, parameters', [
    ('explore_spaces', dict(space='toy', n_steps=20)),
    ('benchmark', dict(repeats=1, eval_repeats=1, batch_size=2, small_batch=2, eval_size=32, n_images=2, n_paths=20,
                       n_searched=8, n_accepted=2, n_classified=200, filter_batch=8, n_layers=[2, 4], n_ops=[3, 5],
                       n_events=2000, out='benchmark.json')),
    ('filter_nasbench', dict(shares=[.01], n_seeds=1, dim=8, ablations=False, out='filter.json')),
    ('rank_of_paths', dict(n_seeds=1, epochs=6, m=100, filter_dim=8, paths_per_epoch=20, out='rank.json')),
    ('search_nasbench', dict(n_seeds=2, n_seeds_offspring=1, budgets=[60, 100], dim=8, out='search.json')),
    ('reproduce_nasbench', dict(results='measured')),
    ('train_supernet', dict(space='toy', epochs=6, m=60, batch_size=16, n_train=320, filter_dim=8, run_dir='run')),
])
def test_notebook_runs_headless(name, parameters, tmp_path, monkeypatch, data_file):
    "Papermill runs it from a folder that is not the project's, and its output stays small."
    if name in NEED_MACRO:
        data_file('nas-bench-macro_cifar10.json')
    monkeypatch.chdir(tmp_path)
    out = tmp_path/f'{name}.ipynb'
    run_notebook(name, out, parameters)
    assert out.stat().st_size < 3e6
