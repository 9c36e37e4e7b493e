"Search: what may be evaluated, exact counts, kills, loosening, and the notebook from a run folder to arch.json."
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import run_notebook
from greedynasv2.core import InputError, Scores, generator
from greedynasv2.nsga2 import (
    SEARCHERS,
    CachedEvaluator,
    SearchConfig,
    cheapest,
    random_search,
    reduce_flops,
    regularised_evolution,
    search,
    search_run,
)
from greedynasv2.runs import Run
from greedynasv2.spaces import get_space, read_arch
from greedynasv2.vpu import PathFilter
from test_training import toy

ROOT = Path(__file__).resolve().parent.parent
SEARCHES = {
    'nsga2': lambda *a, **k: search(*a, report=None, **k),
    'random': random_search,
    'evolution': regularised_evolution,
}


def by_sum(paths):
    "A score that rewards high op indices."
    acc = paths.double().sum(1) + paths[:, 0] / 100
    return Scores((100 - acc).float(), acc.float())


def trained(space, log_phi, dim=4):
    "A filter whose opinion is a function of the path."
    filt = PathFilter(space, dim)
    filt.rounds, filt.log_phi = 1, lambda paths, batch_size=0: log_phi(torch.atleast_2d(paths))
    return filt


@pytest.mark.parametrize('method', SEARCHES)
def test_every_evaluated_path_is_allowed(method):
    "Alive, within the limit at the native size, kept by the filter, and no network twice: whatever the method."
    space = get_space('mbse', image_size=32, n_classes=10)
    for layer in range(0, 21, 2):
        space.drop(layer, 3)
    filt = trained(space, lambda p: torch.where(p[:, 5] % 2 == 0, 0., -5.))         # even ops in layer 5 are weak
    seen = []
    found = SEARCHES[method](space, lambda p: (seen.append(p), by_sum(p))[1], 120, 200e6, filt, seed=3)
    paths = torch.cat(seen)
    assert len(paths) == len(found.history) == 120
    assert len(space.canonical(paths).unique(dim=0)) == 120
    assert space.is_alive(paths).all() and (space.flops(paths, 224) <= 200e6).all() and (paths[:, 5] % 2 == 1).all()
    assert int(space.flops(found.best, 224)) <= 200e6
    assert by_sum(found.best[None]).acc.item() == pytest.approx(found.history.acc.max())


def test_the_front_is_not_beaten():
    "No network of the history beats one of the front in both objectives, and each other one is beaten or equalled."
    found = search(get_space('mbse'), by_sum, 150, seed=0, report=None)
    front, rest = found.pareto, found.history.drop(found.pareto.index)
    def beats(a, b): return (a.acc >= b.acc) & (a.flops <= b.flops) & ((a.acc > b.acc) | (a.flops < b.flops))
    assert not any(beats(found.history, row).any() for row in front.itertuples())
    for row in rest.itertuples():
        same = (front.acc == row.acc) & (front.flops == row.flops)
        assert (beats(front, row) | same).any()
    assert found.history.acc.iloc[100:].mean() > found.history.acc.iloc[:50].mean()


def test_budget_smaller_than_a_population_or_not_a_multiple():
    "Exactly so many evaluations as asked for."
    for n in (1, 7, 50, 51, 149):
        assert len(search(get_space('mbse'), by_sum, n, seed=1, report=None).history) == n


def test_same_seed_same_search():
    "The history follows from the seed, and another seed gives another."
    a, b, c = (search(get_space('mbse'), by_sum, 120, seed=s, report=None).history for s in (5, 5, 6))
    assert a.equals(b) and not a.equals(c)


def test_a_filter_that_rejects_everything_is_set_aside_in_time():
    "The least weak are taken, and it is said."
    space, said = get_space('mbse'), []
    filt = trained(space, lambda p: -p[:, 0] * 1e-3)                                  # all weak; op 12 in layer 0 least
    found = search(space, by_sum, 60, seed=0, path_filter=filt, report=said.append)
    assert len(found.history) == 60 and any('least weak' in s for s in said)
    assert (space.encode(list(found.history.path))[:50, 0] == 12).float().mean() > .9


def test_untrusted_and_foreign_filters():
    "A filter that was rejected is not used; one of another space is refused."
    space, said = get_space('toy'), []
    filt = trained(space, lambda p: torch.zeros(len(p)))
    filt.verdict = 'it keeps almost nothing.'
    search(space, by_sum, 20, path_filter=filt, report=said.append)
    assert said == ['The filter is not used: it keeps almost nothing.']
    with pytest.raises(InputError, match='The filter is of toy'):
        search(get_space('mbse'), by_sum, path_filter=filt)


def test_limits():
    "An impossible limit is refused; a tight one is met by making paths cheaper; none at all is possible."
    space = get_space('mbse')
    least = int(space.flops(cheapest(space)))
    with pytest.raises(InputError, match='the cheapest network of mbse has'):
        search(space, by_sum, max_flops=least - 1)
    found = search(space, by_sum, 60, max_flops=2*least, report=None)
    assert len(found.history) == 60 and (found.history.flops <= 2*least).all()
    only = search(space, by_sum, 60, max_flops=least, report=None)
    assert only.history.flops.unique().tolist() == [least]
    assert 'All networks that may be evaluated are known' in only.notes[-1]
    assert search(space, by_sum, 60, max_flops=math.inf, report=None).history.flops.max() > 330e6


def test_reduce_flops_takes_only_alive_ops():
    "Also where the cheapest op of a layer is gone."
    space = get_space('mbse')
    for layer in range(21):
        space.drop(layer, 0)
    paths = reduce_flops(space, space.sample(200, generator(0)), 320e6, generator(1))
    assert space.is_alive(paths).all() and (space.flops(paths) <= 320e6).all()
    with pytest.raises(InputError, match='the cheapest network of mbse has 291'):
        reduce_flops(space, paths, 250e6)


def test_initial_paths_must_be_allowed():
    "They are evaluated first, as they are; those over the limit are refused."
    space = get_space('mbse')
    few = reduce_flops(space, space.sample(10, generator(0)), 300e6)
    found = search(space, by_sum, 40, initial=few, report=None)
    assert found.history.path[:10].tolist() == space.decode(few, compact=True)
    with pytest.raises(InputError, match='initial paths'):
        search(space, by_sum, 40, max_flops=100e6, initial=few)


SLOW_SEARCH = '''
import sys, time
from pathlib import Path
from greedynasv2.nsga2 import CachedEvaluator, search
from greedynasv2.spaces import get_space
sys.path.insert(0, 'tests')
from test_nsga2 import by_sum
space = get_space('mbse')
def slow(paths): time.sleep(.02 * len(paths)); return by_sum(paths)
search(space, CachedEvaluator(slow, space, sys.argv[1], dict(what='test'), chunk=5), 120, seed=9, report=None)
print('done')
'''


def test_a_killed_search_goes_on(tmp_path):
    "Killed three times while it evaluates, it ends with the history of one left alone; nothing is computed twice."
    file = tmp_path/'evaluations.jsonl'
    for wait in (10, 25, 60):
        process = subprocess.Popen([sys.executable, '-c', SLOW_SEARCH, file], cwd=ROOT)
        while process.poll() is None and (not file.exists() or len(file.read_text().splitlines()) < wait):
            time.sleep(.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    space, asked = get_space('mbse'), []
    n_known = len(file.read_text().splitlines()) - 1
    assert 50 < n_known < 120
    found = search(space,
                   CachedEvaluator(lambda p: (asked.append(len(p)), by_sum(p))[1], space, file, dict(what='test')), 120,
                   seed=9, report=None)
    assert found.history.equals(search(space, by_sum, 120, seed=9, report=None).history)
    assert sum(asked) <= 120 - n_known + 1                                        # the last line may have been torn


def test_infinite_losses_survive_the_file(tmp_path):
    "A path without a finite loss is remembered as that."
    space = get_space('toy')
    def evaluate(p): return Scores(torch.full((len(p),), torch.inf), torch.zeros(len(p)))
    for _ in range(2):
        scores = CachedEvaluator(evaluate, space, tmp_path/'e.jsonl', {'a': 1})(space.sample(5, generator(0)))
    assert scores.loss.isinf().all()
    json.loads((tmp_path/'e.jsonl').read_text().splitlines()[1])


def test_a_run_without_checkpoint(tmp_path):
    "Said in a sentence."
    space = get_space('toy')
    Run.create(tmp_path/'empty', toy(tmp_path/'x'), space).close()
    with pytest.raises(InputError, match='has no checkpoint'):
        search_run(Run.open(tmp_path/'empty'))


@pytest.mark.slow
def test_from_a_run_folder_to_a_network(tmp_path, start):
    "Train a toy supernet, search it by papermill, and read what was found; bad parameters fail at once."
    assert start(toy(tmp_path/'run')).wait() == 0
    def run_search(**given):
        run_notebook('search', tmp_path/'out.ipynb', given)
    run_search(run_dir=str(tmp_path/'run'), n_evals=40, pop_size=10, n_valid=64, n_calibration=64, n_compare=5)
    arch = read_arch(tmp_path/'run/search/arch.json')
    assert arch.facts['search']['n_evals'] == 40 and arch.facts['run'] == str(tmp_path/'run')
    assert (tmp_path/'out.ipynb').stat().st_size < 3e6
    with pytest.raises(Exception, match="Did you mean 'n_evals'"):
        run_search(n_eval=3)
    with pytest.raises(Exception, match='no run'):
        run_search(run_dir=str(tmp_path/'nothing'))


@pytest.mark.parametrize('method', SEARCHES)
def test_scores_that_are_no_numbers_count_as_the_worst(method):
    "The front is that of the others; what is no Scores is refused."
    space = get_space('mbse')
    def partly(paths):
        scores = by_sum(paths)
        scores.acc[paths[:, 0] % 4 == 0] = math.nan
        return scores
    found = SEARCHES[method](space, partly, 60, seed=0)
    assert found.history.acc.notna().all()
    assert by_sum(found.best[None]).acc.item() == pytest.approx(found.history.acc.max())
    with pytest.raises(InputError, match='An evaluator returns Scores'):
        SEARCHES[method](space, lambda p: torch.ones(len(p)), 20)


def test_a_damaged_file_of_evaluations(tmp_path):
    "A torn line in the middle costs that line; a file of something else is refused."
    space, file = get_space('toy'), tmp_path/'e.jsonl'
    paths = space.sample(30, generator(0)).unique(dim=0)
    CachedEvaluator(by_sum, space, file, dict(a=1))(paths)
    lines = file.read_text().splitlines()
    file.write_text('\n'.join([*lines[:5], lines[5][:9], *lines[6:]]))
    assert len(CachedEvaluator(by_sum, space, file, dict(a=1)).known) == len(paths) - 1
    file.write_bytes(b'\xff\x00junk}')
    with pytest.raises(InputError, match='holds evaluations of something else'):
        CachedEvaluator(by_sum, space, file, dict(a=1))



@pytest.mark.parametrize('name', list(SEARCHERS))
def test_searchers_by_name(name):
    "All take the same arguments and give a result of the asked size."
    space = get_space('toy')
    found = SEARCHERS[name](space, by_sum, 30, path_filter=None, pop_size=8, seed=1, report=None, show_progress=False)
    assert len(found.history) == 30 and len(found.pareto)
    with pytest.raises(InputError, match="Did you mean 'nsga2'"):
        SearchConfig(searcher='nsga3')
