"The reproduction on a tiny budget: digits instead of CIFAR-10, everything else as it is."
import json

import pytest

from greedynasv2.core import find_data
from greedynasv2.reproduce import Budget, claims, reproduce
from greedynasv2.runs import Run

TINY = Budget(data='digits', image_size=8, n_train=320, batch_size=32, epochs=4, warmup_epochs=2, q_epochs=2, m=60, n_valid=40, filter_dim=8)
PLAN = {'spos-0': dict(method='spos', seed=0), 'greedynasv2-0': dict(method='greedynasv2', seed=0)}


@pytest.mark.slow
@pytest.mark.skipif(not find_data('nas-bench-macro_cifar10.json'), reason='nas-bench-macro_cifar10.json is not on this machine')
def test_a_plan_is_carried_out_once(tmp_path):
    "Both runs begin from one warm-up, are measured, and are not trained again; what is half done goes on."
    few = dict(n_images=40, n_evals=20, n_random=20, share=.01, n_boot=10)
    done = reproduce(TINY, PLAN, tmp_path/'results', tmp_path/'runs', report=lambda line: None, **few)
    assert list(done) == list(PLAN)
    for name, m in done.items():
        steps = Run.open(tmp_path/'runs'/name).events('step')
        assert steps.step.min() > 20 and m['ranks']['epoch'] == [2, 3]                # the warm-up was done elsewhere
    assert [len(Run.open(tmp_path/'runs'/name).events('round')) for name in PLAN] == [0, 2]
    table = claims(done).set_index('claim').ours
    assert float(table['percentile rank of trained paths, spos (%)']) > 20
    assert table['percentile rank of trained paths, greedynas (%)'] == 'not measured yet'
    lines = []
    assert reproduce(TINY, PLAN, tmp_path/'results', tmp_path/'runs', report=lines.append) == done and not lines
    (tmp_path/'results'/'spos-0.json').unlink()                                        # killed while it was being measured
    again = reproduce(TINY, PLAN, tmp_path/'results', tmp_path/'runs', report=lines.append, **few)
    assert again['spos-0']['top'] == done['spos-0']['top'] and json.dumps(again['greedynasv2-0']) == json.dumps(done['greedynasv2-0'])
