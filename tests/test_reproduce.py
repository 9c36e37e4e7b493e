"The reproduction on a tiny budget: digits instead of CIFAR-10, everything else as it is."
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from conftest import run_notebook
from greedynasv2.core import find_data
from greedynasv2.runs import Run
from greedynasv2.training import make_config, train_supernet
from greedynasv2_studies.claims import claims
from greedynasv2_studies.published import open_published, publish, unpack
from greedynasv2_studies.reproduce import budget_of, reproduce, reproduce_growth

TINY = budget_of(data='digits', image_size=8, n_train=320, batch_size=32, epochs=4, warmup_epochs=2, q_epochs=2, m=60,
                 n_valid=40,
                 filter_dim=8, lr_warmup=0)
PLAN = {'spos-0': dict(method='spos', seed=0), 'greedynasv2-0': dict(method='greedynasv2', seed=0)}
def quiet(line): return None
ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT/'results'/'nasbench_macro.json'
pytestmark = pytest.mark.slow
needs_benchmark = pytest.mark.skipif(not find_data('nas-bench-macro_cifar10.json'),
                                     reason='nas-bench-macro_cifar10.json is not on this machine')


@needs_benchmark
def test_a_plan_is_carried_out_once(tmp_path):
    "Both runs begin from one warm-up, are measured, and are not trained again; measures need no weights."
    few = dict(n_images=40, n_evals=20, n_random=20, share=.01, n_boot=10)
    where = tmp_path/'results', tmp_path/'runs'
    stopped = dict(method='spos', stop_rule='none', stop_epoch=1, run_dir=str(tmp_path/'runs'/'warmup-0'))
    # Half a warm-up: it must go on
    train_supernet(make_config('short', **TINY, **stopped), report=None)
    done = reproduce(TINY, PLAN, *where, report=quiet, **few)
    assert list(done) == list(PLAN)
    for name, m in done.items():
        steps = Run.open(tmp_path/'runs'/name).events('step')
        # The warm-up was done elsewhere
        assert steps.step.min() > 20 and m['ranks'].epoch.tolist() == [2, 3]
    assert [len(Run.open(tmp_path/'runs'/name).events('round')) for name in PLAN] == [0, 2]
    table = claims(done).set_index('claim').ours
    assert float(table['percentile rank of trained paths, spos (%)']) > 20
    assert table['percentile rank of trained paths, greedynas (%)'] == 'not measured yet'
    # Killed while it was published
    (tmp_path/'results'/'spos-0'/'results.json').unlink()
    lines = []
    again = reproduce(TINY, PLAN, *where, report=lines.append, **few)
    assert len(lines) == 2 and again['spos-0']['tau'] == done['spos-0']['tau']
    shutil.rmtree(tmp_path/'runs')
    assert claims(reproduce(TINY, PLAN, *where, report=lines.append, **few)).equals(claims(done)) and len(lines) == 2


@needs_benchmark
def test_larger_spaces(tmp_path):
    "The networks found, and pairs of ops in the first space, once both its runs are there."
    # For a filter
    where = tmp_path/'results', tmp_path/'runs'
    enough = dict(image_size=16, m=300, aligned=True, q_label=.5, filter_iters=0)
    def budget(space): return {**TINY, **enough, 'space': space}
    how = dict(spaces=('toy',), budget=budget, plan=lambda space: (PLAN, {}), n_images=20, n_final=40, n_evals=10,
               epochs=1, n_train=320, alike=dict(n_images=20, n_calibration=20, n=2, n_paths=5, n_random=40))
    assert reproduce_growth(*where, missing=False, **how) == ({'toy': {}}, None)
    for name, changes in PLAN.items():                        # trained here: what notebooks do is tested above
        train_supernet(make_config('short', **budget('toy'), **changes, stop_rule='none',
                                   run_dir=str(tmp_path/'runs'/'toy'/name)), report=None)
    grown, alike = reproduce_growth(*where, report=quiet, **how)
    assert [0 <= m['found']['acc'] <= 100 and 0 < m['retrained'] <= 100 for m in grown['toy'].values()] == [True, True]
    kinds = 'similar', 'same layers', 'dissimilar', 'random'
    assert list(alike['pairs'].pairs) == [kind for kind in kinds for _ in range(2)]
    ours = claims({}, grown, alike).set_index('claim').ours
    for kind in ('similar', 'random'):
        for what in ('similarity', 'kendall', 'moved'):
            assert '95 %' in ours[f'pairs of ops, {kind}: {what}']
    shutil.rmtree(tmp_path/'runs')
    grown_again, again = reproduce_growth(*where, missing=False, **how)
    assert all(again[key].equals(alike[key]) for key in ('pairs', 'layers'))
    assert claims({}, grown_again, again).equals(claims({}, grown, alike))


@pytest.mark.skipif(not PUBLISHED.exists(), reason='nothing is published yet')
def test_published_runs_are_whole(tmp_path):
    "Every file of every run is, byte for byte, as it was before compression, and compresses to the same file again."
    root = PUBLISHED.with_suffix('')
    runs = sorted(config.parent for config in root.rglob('config.json'))
    for run in runs:
        unpack(run, tmp_path/run.relative_to(root))
    files = {str(f.relative_to(tmp_path)): f for f in tmp_path.rglob('*') if f.is_file()}
    expected = [line.split('  ', 1) for line in (root/'sha256.txt').read_text().splitlines()]
    found = {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()}
    assert {name: digest for digest, name in expected} == found
    for run in runs:
        again = tmp_path/'again'/run.relative_to(root)
        unpacked = tmp_path/run.relative_to(root)
        publish(unpacked, again, [f.name for f in unpacked.iterdir()])
        assert {f.name: f.read_bytes() for f in again.iterdir()} == {f.name: f.read_bytes() for f in run.iterdir()}
        assert len(open_published(run).events('step')) > 100


@pytest.mark.skipif(not PUBLISHED.exists(), reason='nothing is published yet')
def test_what_is_published_follows_from_published_runs(tmp_path, data_file):
    "The notebook gives the same numbers again from a copy of results/nasbench_macro, without a single weight."
    data_file('nas-bench-macro_cifar10.json')
    shutil.copytree(PUBLISHED.with_suffix(''), tmp_path/'nasbench_macro')
    run_notebook('reproduce_nasbench', tmp_path/'out.ipynb', dict(results=str(tmp_path/'nasbench_macro')))
    again, published = (json.loads(f.read_text()) for f in (tmp_path/'nasbench_macro.json', PUBLISHED))
    assert list(again['runs']) == list(published['runs']) and published['runs']
    for name, run in published['runs'].items():
        for key in ('rank', 'shares', 'tau', 'tau_by_loss', 'found', 'unfiltered'):
            assert again['runs'][name][key] == run[key], (name, key)
    assert [c['claim'] for c in again['claims']] == [c['claim'] for c in published['claims']]
    def told(found):
        # A filter's edge
        return {c['claim']: c['ours'] for c in found['claims'] if not c['claim'].startswith('filters that reject')}
    assert told(again) == told(published)
    for key in 'growth', 'alike', 'the_same':
        assert again[key] == published[key], key
