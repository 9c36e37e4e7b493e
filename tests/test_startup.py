"A module imports only what it needs at once: training starts as fast as torch allows, watching needs no torch."
import subprocess
import sys

import pytest

import greedynasv2

# Each of them takes from a tenth of a second to two seconds to import
HEAVY = {'plotly', 'matplotlib', 'ipywidgets', 'anywidget', 'IPython', 'timm', 'torchvision', 'pymoo', 'sklearn',
         'scipy'}


def in_fresh_process(code, *args):
    "What `code` prints in a new process, as words."
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True,
                          check=True).stdout.split()


@pytest.mark.parametrize('module', ['training', 'supernet', 'vpu', 'data'])
def test_a_fresh_process_imports_no_more_than_it_needs(module):
    "Figures, widgets, transforms and statistics wait until they are used."
    code = f'import sys, greedynasv2.{module}; print(*{{name.split(".")[0] for name in sys.modules}})'
    loaded = in_fresh_process(code)
    assert 'torch' in loaded and not HEAVY & set(loaded)


@pytest.mark.parametrize('module', ['core', 'ops', 'facts', 'merger', 'events', 'runs', 'viz', 'widgets'])
def test_what_watchers_read_with_imports_no_torch(module):
    "Facts of a space, plans, events, run folders, figures and widgets."
    assert in_fresh_process(f'import sys, greedynasv2.{module}; print("torch" in sys.modules)') == ['False']


WATCH = '''
import sys
import greedynasv2 as g
from greedynasv2.runs import Run, list_runs, same_events, write_control
from greedynasv2.widgets import Dashboard
folder = sys.argv[1]
run = Run.open(folder)
run.events(), run.status, run.results, list_runs(sys.argv[2]), same_events(run, run)
facts = run.facts_at()
facts.rows(facts.encode('0000')), facts.summary()
write_control(folder, merge_threshold=.6)
live = Dashboard(folder, live=True)
for tab, panel in enumerate(live.panels):
    live.tabs.selected_index = tab
    live.refresh()
    assert panel.live and all(figure.spec for figure in panel.live.values()), panel.title
merges = live.panels[2]
assert not isinstance(merges.trial(), str) and len(merges.trial()[1]), merges.trial()
assert 'cannot be shown' not in live.feed.value and 'What if' in merges.note.value
live.close()
plain = Dashboard(folder, live=False)
plain._ipython_display_()
print('torch' in sys.modules, facts.size)
'''


def pretend(folder):
    "A run of the toy space with two rounds, one merge, and ops that are alike."
    from greedynasv2.facts import get_facts
    from greedynasv2.runs import Run
    alike = [[1., .9, .1, 0.], [.9, 1., 0., 0.], [.1, 0., 1., .7], [0., 0., .7, 1.]]
    with Run.create(folder, dict(method='greedynasv2', seed=0, merge_threshold=.5, max_merges=0, beta=.9),
                    get_facts('toy')) as run:
        run.log('start', step=0, n_steps=20)
        for r in range(2):
            for step in range(10*r, 10*r + 10):
                run.log('step', step=step, epoch=r, loss=2/(1 + step), images_per_s=300.)
            run.log('accept', step=10*r, rate=.5, drawn=10, kept=5)
            run.log('similarity', round=r, step=10*r, matrices=[alike]*4, better=[[0, 1, 0]])
            if not r:
                run.log('merge', round=r, layer=2, kept='ID', removed='MB3_K3', similarity=.9, decision='merge')
            run.log('round', round=r, step=10*r, q=.5, kept=.5, u=.9, kappa=.5, filter_loss=.1, verdict='',
                    phi=[5, 3, 1],
                    merged=1 - r, ops=15, log10_size=2.3)
        run.finish('end', results=dict(best='0000'))


def test_a_dashboard_draws_a_run_without_torch(tmp_path):
    "Every panel, live and plain, what-if of merges included, in a process that never imports torch."
    pretend(tmp_path/'run')
    *_, torch_there, size = in_fresh_process(WATCH, tmp_path/'run', tmp_path)
    assert (torch_there, size) == ('False', str(4*4*3*4))


def test_the_front_door():
    "It is cheap, lists its names, and says what it has not."
    code = 'import sys; before = set(sys.modules); import greedynasv2; print(*set(sys.modules) - before)'
    loaded = in_fresh_process(code)
    assert set(loaded) <= {'greedynasv2', 'greedynasv2.retrain'}
    listed = ('get_space SuperNet train_supernet search retrain Run Dashboard load_network TrainConfig make_config '
              'load_macro register_op register_space')
    assert set(listed.split()) <= set(greedynasv2.__all__) <= set(dir(greedynasv2))
    with pytest.raises(AttributeError, match="no attribute 'get_spaces'; it offers .*get_space"):
        assert greedynasv2.get_spaces
    assert in_fresh_process('from greedynasv2 import *; print(get_space("toy").size)') == ['256']


EVERYTHING = '''
import importlib, inspect, pkgutil
import greedynasv2 as g
from greedynasv2.retrain import retrain_config          # as before its module was renamed
import greedynasv2.retrain
for module in pkgutil.iter_modules(g.__path__):
    if module.name != '_modidx': importlib.import_module(f'greedynasv2.{module.name}')
for name in g.__all__:
    there = getattr(g, name)
    assert not inspect.ismodule(there), name
    assert name == '__version__' or there.__name__ == name, name
assert callable(g.retrain) and callable(retrain_config)
print(len(g.__all__))
'''


def test_no_submodule_takes_the_place_of_a_function():
    "All submodules imported, by their old names too: every name of the front door is what it was."
    assert int(in_fresh_process(EVERYTHING)[-1]) == len(greedynasv2.__all__)
