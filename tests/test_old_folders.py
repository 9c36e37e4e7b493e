"Folders that version 0.0.1 wrote still open, go on where they stopped, and load."
import json
import tarfile
from pathlib import Path

import pytest
import torch

from greedynasv2.nsga2 import SearchConfig, search_run
from greedynasv2.runs import Run, same_events
from greedynasv2.supernet import load_network
from greedynasv2.training import make_config, train_supernet

HERE = Path(__file__).parent
# How `supernet` and `interrupted` were trained; the latter was stopped after six of eight epochs
SUPERNET = dict(space='toy', width=.25, epochs=8, warmup_epochs=3, round_every=2, n_train=320, batch_size=32, m=190,
                n_valid=100, filter_dim=8, merge_threshold=.4, max_merges=1, stop_rule='none')


@pytest.fixture
def old(tmp_path, monkeypatch):
    "A folder with what version 0.0.1 wrote: supernet, interrupted, retrain, retrain-interrupted, network."
    with tarfile.open(HERE/'old_folders.tar.gz') as archive:
        archive.extractall(tmp_path, filter='data')
    monkeypatch.chdir(tmp_path)                      # the folders name each other relative to this one
    return tmp_path


def nearly_equal(ours, theirs):
    "True when two events, or parts of them, differ by rounding alone: processors of other kinds round otherwise."
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(nearly_equal(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(nearly_equal, ours, theirs))
    if isinstance(ours, float) or isinstance(theirs, float):
        return ours == pytest.approx(theirs, rel=.01, abs=.01)
    return ours == theirs


def test_a_run_opens(old):
    "Events, space, weights and filters of every round."
    run = Run.open(old/'supernet')
    assert run.status == 'ended'
    assert len(run.events('round')) == 3
    assert len(run.events('step')) == 8
    assert run.space.size == 96
    assert run.net.n_params > 0
    kept = [1 - run.filter_at(r).is_weak(run.space.sample(500)).float().mean().item() for r in range(3)]
    assert all(0 < share < 1 for share in kept)
    assert run.filter.is_weak(run.space.sample(5)).shape == (5,)


@pytest.mark.slow
def test_an_interrupted_run_goes_on(old):
    "Parameters that came later mean for it what version 0.0.1 did: it ends as the run that was never interrupted."
    run = train_supernet(make_config('demo', **SUPERNET, run_dir=str(old/'interrupted')), report=None)
    assert run.status == 'ended'
    theirs = Run.open(old/'supernet')
    ours, expected = (r.events('merge').drop(columns='t').to_dict('records') for r in (run, theirs))
    assert nearly_equal(ours, expected)
    losses = [r.events('step').loss.tolist() for r in (run, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=.01)
    different = [line for line in same_events(run, theirs) if 'events against' in line]
    assert not different


@pytest.mark.slow
def test_a_search_goes_on(old):
    "Evaluations that are there are not made again, and the same network is found."
    found_before = json.loads((old/'supernet/search/arch.json').read_text())
    evaluations = next((old/'supernet/search').glob('evaluations-*.jsonl'))
    lines_before = evaluations.read_text()
    cfg = SearchConfig(n_evals=40, pop_size=10, n_valid=100, n_calibration=64, n_compare=0, max_flops=1e9)
    search_run(Run.open(old/'supernet'), cfg, report=None)
    assert evaluations.read_text() == lines_before
    found_after = json.loads((old/'supernet/search/arch.json').read_text())
    assert found_after['path'] == found_before['path']


@pytest.mark.slow
def test_retraining_goes_on(old):
    "From the checkpoint after the first of two epochs."
    from greedynasv2.retraining import retrain, retrain_config
    arch = str(old/'supernet/search/arch.json')
    cfg = retrain_config(arch=arch, epochs=2, n_train=160, inherit='arch', run_dir=str(old/'retrain-interrupted'))
    run = retrain(cfg, report=None)
    assert run.results['test_loss'] == pytest.approx(Run.open(old/'retrain').results['test_loss'], rel=.01)
    assert run.events('resume').step.tolist() == [5]


def test_an_exported_network_loads(old):
    "In evaluation mode, with one output for each class."
    net = load_network(old/'network')
    assert net(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
