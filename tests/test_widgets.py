"Widgets on a page that a person could look at: JupyterLab, Chromium, and training runs in other processes."
import ast
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from browser import ROOT, chromium, jupyter_lab, missing, notebook, open_notebook, photograph, run_cells
from conftest import until
from greedynasv2.runs import Run
from greedynasv2.spaces import get_space
from greedynasv2.widgets import Dashboard, RunData, RunList, Watch, WatchFilter, command_to_go_on, feed_html
from greedynasv2_studies.bench import measure_events, write_events

COMPANIONS = 'watch_filter', 'watch_similarity', 'watch_merges'
needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or 'there is a browser')
HTML = '<img src=x onerror="window.hacked=1">'
# A round every second epoch, and no merge before somebody asks for one: it lasts until it is stopped
SLOW_TOY = dict(space='toy', epochs=2000, warmup_epochs=3, round_every=2, n_train=320, batch_size=32, m=190,
                n_valid=100, filter_dim=8, merge_threshold=1., stop_rule='none')
# `make pictures`: where README's pictures go. They show a real run: the demo with ten rounds instead of five, and a
# lower threshold, because at 0.8 a filter of 16 values merges nothing in so short a run
PICTURES = os.environ.get('GREEDYNASV2_PICTURES', '')
MBSE = dict(recipe='demo', space='mbse', epochs=36, warmup_epochs=6, round_every=3, m=600, merge_threshold=.65,
            stop_rule='none')


def papermill(name, out, folder, **parameters):
    "Papermill in a process of its own, in `folder`."
    given = [a for k, v in parameters.items() for a in ('-p', k, str(v))]
    env = {**os.environ, 'OMP_NUM_THREADS': '1',
           'PYTHONPATH': os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])}
    with open(Path(f'{out}.log'), 'wb') as log:
        return subprocess.Popen([sys.executable, '-m', 'papermill', '--no-progress-bar', str(ROOT/f'nbs/{name}.ipynb'),
                                 str(out), *given],
                                cwd=folder, env=env, stdout=log, stderr=log)


def hostile(folder):
    "A run that was tampered with: HTML in names, broken lines, wrong kinds of fields, and enough that can be drawn."
    run = Run.create(folder, dict(method=HTML, merge_threshold=.5, beta='x'), get_space('toy'))
    n = [HTML, '<b>bold</b>', '</script><script>window.hacked=1</script>', '%{x} $x$ &lt;']
    run.log('start', step=0, n_steps=10, data=HTML)
    for r in range(3):
        run.log('step', step=5*r, epoch=0, loss=1., images_per_s=1., paths=[HTML])
        run.log('similarity', round=r,
                matrices=[[[1., .9, .1, 0.], [.9, 1., 0., 0.], [.1, 0., 1., .7], [0., 0., .7, 1.]]]*4)
        run.log('merge', round=r, layer=r, kept=n[0], removed=n[1], similarity=.9, decision='merge' if r else HTML)
        run.log('round', round=r, step=5*r, q=.5, kept=.5, u=.9, kappa=.5, phi=[1, 2, 3], verdict=HTML, ops=4,
                log10_size=2.)
    run.log('control', step=1, stop=HTML, merge_threshold=HTML, vetoes=[[0, HTML, '<b>'], HTML])
    run.log('warning', step=2, message=HTML)
    run.log('round', round=HTML, phi=HTML)
    run.log('similarity', round=3, matrices=[[['x']]])
    run.finish('stop', reason=HTML, step=10)
    about = json.loads((folder/'config.json').read_text())
    about['space'].update(name=HTML, ops=n)
    (folder/'config.json').write_text(json.dumps(about))
    with open(folder/'events.jsonl', 'ab') as f:
        f.write(b'{"t": 9, "kind": "step", "lo\n\xff\xfe\n[]\n{"t": {}, "kind": "round", "round": 1e999}\n')
    return folder


# -- without a browser

def test_training_knows_nothing_of_figures():
    "No module but widgets imports viz or widgets, also not inside a function."
    for path in sorted((ROOT/'greedynasv2').glob('*.py')):
        if path.stem == 'widgets' or path.stem.startswith('_'):
            continue
        imports = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in imports for alias in node.names}
        names |= {node.module or '' for node in imports if isinstance(node, ast.ImportFrom)}
        last = {name.split('.')[-1] for name in names}
        assert not last & {'viz', 'widgets'}, path.name


def test_methods_without_a_filter():
    "Widgets know without torch which methods train no filter; `METHODS` says the same."
    from greedynasv2.algorithm import METHODS
    from greedynasv2.events import WITHOUT_FILTER
    assert sorted(WITHOUT_FILTER) == sorted(name for name, parts in METHODS.items() if parts.filter == 'none')


def test_nothing_in_a_folder_ends_a_watcher(tmp_path):
    "Events with random kinds of values in every field: all panels are drawn, and the header never reports a failure."
    rng, folder = random.Random(0), hostile(tmp_path/'run')
    lines = (folder/'events.jsonl').read_bytes().split(b'\n')
    values = [None, -1, 10**400, 1e308, 'x', HTML, [], [[]], [1, 'a'], {}, {'a': []}, True, 0.5]
    for _ in range(12):
        rows = [json.loads(line) for line in lines[:18]]
        for row in rows:
            for key in list(row):
                if key != 'kind' and rng.random() < .3:
                    row[key] = rng.choice(values)
        (folder/'events.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
        board = Dashboard(folder, live=True, every=3600.)
        for board.tabs.selected_index in (0, 1, 2):
            assert 'cannot be shown' not in board.feed.value, board.feed.value
        board.close()


@pytest.mark.parametrize('kinds', [[], ['start'], ['start', 'step'], ['round'], ['similarity'], ['merge'], ['control']])
def test_a_run_that_has_only_begun(tmp_path, kinds):
    "Any one kind of event may be there without the others."
    with Run.create(tmp_path/'run', dict(seed=0), get_space('toy')) as run:
        for kind in kinds:
            run.log(kind, step=1)
        board = Dashboard(tmp_path/'run', live=True, every=3600.)
        for board.tabs.selected_index in (0, 1, 2):
            assert 'cannot be shown' not in board.feed.value, board.feed.value
        board.close()


def test_folders_that_are_no_runs(tmp_path):
    "Nothing there, something else there, a broken config: said, and looked for again."
    watch = WatchFilter(tmp_path/'later', live=True, every=.05)
    assert 'no config.json' in watch.status.value
    (tmp_path/'later').mkdir()
    (tmp_path/'later'/'config.json').write_text('{"parameters": [], "space": 3}')
    until(lambda: 'lacks parameters and space' in watch.status.value, 10, 'a broken config')
    (tmp_path/'later'/'config.json').unlink()
    with Run.create(tmp_path/'later', dict(seed=0), get_space('toy')) as run:
        run.log('start', step=0, n_steps=10)
        until(lambda: 'data-status="running"' in watch.status.value, 10, 'a run that has begun')
    watch.close()


def test_the_thread_ends_with_the_widget(tmp_path):
    "By close, and when somebody closes the widget itself."
    with Run.create(tmp_path/'run', dict(seed=0), get_space('toy')) as run:
        run.log('start', step=0)
    def threads(): return [t for t in threading.enumerate() if t.name.startswith('watch ')]
    one, two = (Watch.__subclasses__()[i](tmp_path/'run', live=True, every=.05) for i in (0, 1))
    assert len(threads()) == 2
    one.close()
    two.box.close()
    until(lambda: not threads(), 10, 'threads that end')
    assert not Watch.open


def test_a_run_in_this_kernel_and_a_resumed_one(tmp_path):
    "A `Run` may be given; rows that a resume repeats are drawn once."
    run = Run.create(tmp_path/'run', dict(seed=0), get_space('toy'))
    run.log('start', step=0, n_steps=8)
    run.save(0, {})
    for step in (1, 2, 3):
        run.log('step', step=step, loss=1.)
    data = RunData(run)
    assert data.status == 'running' and data.table('step').step.tolist() == [1, 2, 3]
    run.close()
    assert data.poll() and data.status == 'dead'
    run = Run.create(tmp_path/'run', dict(seed=0), get_space('toy'), resume=True)
    run.resume()
    run.log('step', step=1, loss=2.)
    assert data.poll() and data.table('step').loss.tolist() == [2.]
    assert data.progress()['share'] == 1/8
    run.close()


def test_what_if_knows_ops_that_did_better(tmp_path):
    "Pairs of the newest round, as training logs them; what makes no sense is left out."
    run = Run.create(tmp_path/'run', dict(seed=0), get_space('toy'))
    for r in range(2):
        run.log('similarity', round=r, matrices=[[[.9]*4]*4]*4, better=[[0, 3, 1], [9, 9, 9], 'x', [0, 1]] if r else 7)
    run.close()
    data = RunData(tmp_path/'run')
    assert data.better().sum() == data.better()[0, 3, 1] == 1


def some_run(folder, parameters, steps=3, end='', **fields):
    "A run of the toy space that has made some steps; `end`: how it ended, empty for one that was killed."
    run = Run.create(folder, parameters, get_space('toy'))
    run.log('start', step=0, n_steps=10)
    for step in range(1, steps + 1):
        run.log('step', step=step, epoch=0, loss=1/step, images_per_s=300.)
    if fields:
        run.log('eval', step=steps, **fields)
    if end:
        run.finish(end, reason='why not', step=steps)
    else:
        run.close()
    return folder


def test_the_table_of_runs_follows_them(tmp_path):
    "A run that begins, one that dies, one of each kind; the newest that runs is shown, and panels that say something."
    root = tmp_path/'runs'
    board = Dashboard(root=root, live=True, every=.05)
    assert 'There is no run under' in board.status.value and board.tabs.layout.display == 'none'
    some_run(root/'retrained', dict(method='retrain'), end='end', loss=1.2, top1=61., top5=90., raw_top1=55.)
    def shown(): return board.table.chosen == 'retrained' and board.tabs.titles == ('Retraining',)
    until(shown, 20, 'the first run, shown')
    some_run(root/'detector', dict(detector='fcos', epochs=3), end='end', mAP=.25, AP50=.4, AP75=.2)
    some_run(root/'uniform', dict(method='spos'), end='stop')
    some_run(root/'killed', dict(method='greedynasv2'))
    def row(name): return next((r for r in board.rows if r['name'] == name), {})
    until(lambda: row('killed').get('state') == 'dead', 20, 'the dead run in the table')
    assert [row(n)['state'] for n in ('retrained', 'detector', 'uniform')] == ['ended', 'ended', 'stopped']
    assert (row('retrained')['acc'], row('detector')['acc'], row('uniform')['loss']) == (61., 25., 1/3)
    assert board.table.chosen == 'retrained'                       # nobody asked for another
    for name, titles in [('detector', ('Detection',)), ('uniform', ('Training',)),
                         ('killed', ('Filter', 'Similarity', 'Merges'))]:
        board.table.chosen = name
        assert board.tabs.titles == titles and 'cannot be shown' not in board.feed.value
    board.close()
    with Run.create(root/'alive', dict(method='greedynasv2'), get_space('toy')) as run:
        run.log('start', step=0, n_steps=10)
        some_run(root/'later', dict(method='spos'), end='end')
        other = Dashboard(root=root, live=True, every=.05)
        assert other.table.chosen == 'alive'                       # not the one that was written to last
        run.log('step', step=1, loss=1.)
        until(lambda: next(r for r in other.rows if r['name'] == 'alive')['step'] == 1, 20, 'its step in the table')
    until(lambda: next(r for r in other.rows if r['name'] == 'alive')['state'] == 'dead', 20, 'its end in the table')
    other.close()


def test_only_what_has_changed_is_read_again(tmp_path, monkeypatch):
    "A table of runs that are over costs nothing but a look at their files."
    for i in range(5):
        some_run(tmp_path/f'run {i}', dict(method='spos'), end='end')
    runs = RunList(tmp_path)
    before = runs.rows()
    monkeypatch.setattr('greedynasv2.widgets.RunData', None)
    assert runs.rows() == before and len(before) == 5


def test_a_dead_run_says_what_was_lost_and_goes_on_by_its_command(tmp_path):
    "Steps since the checkpoint, and a command that a shell takes."
    from greedynasv2.training import TrainConfig, run_parameters
    cfg = TrainConfig(space='toy', epochs=3)
    folder = tmp_path/'a run'
    with Run.create(folder, run_parameters(cfg), get_space('toy')) as run:
        run.log('start', step=0, n_steps=10)
        run.save(2, {})
        for step in (1, 2, 3, 4, 5):
            run.log('step', step=step, loss=1.)
        watch = WatchFilter(folder, live=True, every=3600.)
        assert 'a kill would lose 3 steps' in watch.status.value and not watch.stop.disabled
    watch.data.poll()
    watch.refresh()
    assert '3 steps since then will be repeated' in watch.status.value and 'Last heard of at' in watch.status.value
    assert watch.stop.disabled and 'the run is dead' in watch.stop.tooltip
    watch.close()
    words = shlex.split(command_to_go_on(RunData(folder)))
    assert words[:2] == ['python', '-c']
    config = ast.parse(words[2]) and TrainConfig(**Run.open(folder).config, run_dir=str(folder))
    assert run_parameters(config) == run_parameters(cfg)


def test_a_warning_stands_out_and_the_feed_stays_as_high_as_it_is(tmp_path):
    "By a sign, bold letters and a bar, not by colour alone; the same height with one line and with many."
    with Run.create(tmp_path/'run', dict(seed=0), get_space('toy')) as run:
        run.log('start', step=0, n_steps=10)
        data = RunData(tmp_path/'run')
        one = feed_html(data)
        assert '⚠' not in one
        for step in range(9):
            run.log('warning', step=step, message=HTML)
        data.poll()
        many = feed_html(data)
        assert many.count('⚠') == 5 and '<img' not in many
        height = re.compile(r'height:[\d.]+em')
        assert height.search(one)[0] == height.search(many)[0]


@pytest.mark.slow
def test_a_million_events(tmp_path, capsys):
    "A watcher opens a run of a million steps in seconds, looks again in less than one, and sends little to the page."
    write_events(tmp_path/'run', 1_000_000)
    found = measure_events(tmp_path/'run')
    with capsys.disabled():
        print(f'\n  {found}')
    assert found['drawn_rows'] <= 1000 and found['page_kb'] < 500 and found['held_mb'] < 100
    assert found['open_seconds'] < 15 and found['look_seconds'] < 1        # a busy machine may take its time


# -- headless

@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A toy run that is over."
    from greedynasv2.training import make_config, train_supernet
    folder = tmp_path_factory.mktemp('finished')/'run'
    train_supernet(make_config('demo',
                               **{**SLOW_TOY, 'epochs': 6, 'merge_threshold': .5, 'max_merges': 1,
                                  'run_dir': str(folder)}), report=None)
    return folder


@pytest.mark.slow
def test_companions_run_headless_and_as_a_page(finished, tmp_path):
    "Papermill: plain figures, no widget state, small; without a run they make one. nbconvert: a browser draws them."
    given = {name: dict(run_dir=finished) for name in COMPANIONS[:2]} | {'watch_merges': dict(epochs=3)}
    jobs = {}
    for name, parameters in given.items():
        jobs[name] = papermill(name, tmp_path/f'{name}.ipynb', tmp_path, **parameters)
    n_figures = dict(watch_filter=5, watch_similarity=2, watch_merges=4)
    for name, job in jobs.items():
        assert job.wait(300) == 0, (tmp_path/f'{name}.ipynb.log').read_text()[-2000:]
        path = tmp_path/f'{name}.ipynb'
        nb = json.loads(path.read_text())
        outputs = [o['data'] for c in nb['cells'] for o in c.get('outputs', []) if 'data' in o]
        figures = [d for d in outputs if 'application/vnd.plotly.v1+json' in d]
        assert len(figures) == n_figures[name] and all({'text/html', 'image/png'} <= d.keys() for d in figures)
        assert path.stat().st_size < 1e6 and 'widgets' not in nb['metadata']
        assert not any('widget-view' in k for d in outputs for k in d)
        assert 'ended' in ''.join(outputs[0]['text/plain'])
    subprocess.run([sys.executable, '-m', 'nbconvert', '--to', 'html', str(tmp_path/'watch_filter.ipynb')], check=True,
                   capture_output=True)
    if missing():
        pytest.skip(missing())
    with chromium() as context:
        page = context.new_page()
        served = dict(content_type='text/javascript', headers={'Access-Control-Allow-Origin': '*'}, body=plotly_js())
        def answer(route):
            if 'cdn.plot.ly' in route.request.url:
                route.fulfill(**served)
            else:
                route.abort()
        page.route(re.compile('^https?://'), answer)
        page.goto((tmp_path/'watch_filter.html').as_uri())
        page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 5",
                               timeout=60_000)
        assert drawn(page, 'Acceptance')['points'] > 3


def plotly_js():
    from plotly.offline import get_plotlyjs
    return get_plotlyjs()


# -- in the browser

def drawn(page, title, trace=0):
    "What a figure shows: title, number of points, sum of its heat map, and whether its element was marked."
    return page.evaluate('''([title, trace]) => {
        const g = [...document.querySelectorAll('.js-plotly-plot')].find(g => g.layout?.title?.text?.startsWith(title));
        if (!g) return null;
        const t = g._fullData[trace] ?? {}, z = t.z ? [...t.z].map(r => [...r]).flat().filter(Number.isFinite) : [];
        const sum = z.reduce((a, b) => a + b, 0);
        return { title: g.layout.title.text, points: t.x?.length ?? 0, sum, marked: !!g.marked };
    }''', [title, trace])


def wait_drawn(page, title, true, seconds=60, trace=0):
    "Wait until a figure is there and `true` of it."
    until(lambda: (d := drawn(page, title, trace)) and true(d), seconds, f'figure {title}')
    return drawn(page, title, trace)


def mark(page, title):
    "Leave a mark on the element of a figure: an update in place keeps it."
    page.evaluate('''title => {
        const all = [...document.querySelectorAll('.js-plotly-plot')];
        all.find(g => g.layout?.title?.text?.startsWith(title)).marked = true;
    }''', title)


def text(page, selector): return page.inner_text(f'{selector} >> nth=0')


def chosen(page):
    "The pair that is chosen in the list."
    text = page.evaluate('''() => {
        const list = document.querySelector('.nas-pair select');
        return list.options[list.selectedIndex]?.text ?? '';
    }''')
    return text.replace('\xa0', ' ')


def press(page, slider, key):
    "Press a key on a slider."
    page.locator(f'.nas-{slider} .noUi-handle').first.press(key)


class Stage:
    "A papermill run, and companions that watch it in JupyterLab."
    def __init__(self, folder, **parameters):
        self.folder = folder
        self.run_dir = folder/'runs'/('mbse' if PICTURES else 'live')
        self.pages = {}
        self.errors = []
        self.parameters = parameters
        self.start()

    def open(self, address, context):
        "Open all notebooks, then run them: their kernels start side by side."
        folder = self.folder
        for name in COMPANIONS:
            notebook(folder/f'{name}.ipynb', name, run_dir=str(self.run_dir))
        notebook(folder/'board.ipynb',
                 ['from greedynasv2.widgets import Dashboard', f'Dashboard(root={str(folder/"runs")!r})'])
        until(lambda: (self.run_dir/'events.jsonl').exists(), 120, 'the run')
        hostile(folder/'runs'/HTML.replace('/', ''))
        for name in (*COMPANIONS, 'board'):
            page = self.pages[name] = context.new_page()
            page.on('pageerror', lambda e: self.errors.append(str(e)))
            page.on('dialog', self.answer)
            open_notebook(page, address(f'{name}.ipynb'))
        for page in self.pages.values():
            run_cells(page)
        for page in self.pages.values():
            page.wait_for_selector('.nas-status', timeout=180_000)

    def start(self):
        "The run, through papermill."
        self.job = papermill('train_supernet', self.folder/'out.ipynb', self.folder, run_dir=self.run_dir,
                             **self.parameters)

    def answer(self, dialog):
        "JupyterLab may ask whether to leave a notebook that is not saved; nobody else has anything to say."
        if dialog.type != 'beforeunload':
            self.errors.append(dialog.message)
        dialog.accept()

    @property
    def run(self): return Run.open(self.run_dir)

    def end(self):
        "End the run; papermill ends its kernel, too."
        if self.job.poll() is None:
            self.job.send_signal(signal.SIGINT)
        try:
            self.job.wait(60)
        except subprocess.TimeoutExpired:
            self.job.kill()


@pytest.fixture(scope='module')
def stage(tmp_path_factory):
    made = Stage(tmp_path_factory.mktemp('stage'), **(MBSE if PICTURES else SLOW_TOY))
    large = dict(viewport=dict(width=1240, height=1900), device_scale_factor=1.5) if PICTURES else {}
    try:
        with jupyter_lab(made.folder) as address, chromium(**large) as context:
            made.open(address, context)
            yield made
    finally:
        made.end()


# The tests below share one run and go through its life in order.

@needs_browser
@pytest.mark.slow
def test_acceptance_grows_in_place(stage):
    page = stage.pages['watch_filter']
    assert 'running' in text(page, '.nas-status')
    before = wait_drawn(page, 'Acceptance', lambda d: d['points'] > 0)
    mark(page, 'Acceptance')
    after = wait_drawn(page, 'Acceptance', lambda d: d['points'] > before['points'])
    assert after['marked']                                       # the same element: no flicker
    assert re.search(r'step [\d,]+ of [\d,]+, loss [\d.]+.*left', text(page, '.nas-status'))


@needs_browser
@pytest.mark.slow
def test_heat_map_follows_rounds_and_sliders(stage):
    page = stage.pages['watch_similarity']
    before = wait_drawn(page, 'Layer 0', lambda d: d['points'] == 4)
    mark(page, 'Layer 0')
    after = wait_drawn(page, 'Layer 0', lambda d: d['title'] != before['title'])            # a later round
    assert after['marked'] and after['sum'] != before['sum']
    press(page, 'layer', 'End')
    wait_drawn(page, 'Layer 3', lambda d: d['marked'])
    press(page, 'round', 'Home')
    first = wait_drawn(page, 'Layer 3, round 0', lambda d: True)
    press(page, 'threshold', 'End')
    wait_drawn(page, 'Layer 3', lambda d: d['points'] == 0, trace=1)                        # no pair is above 1
    press(page, 'threshold', 'Home')
    wait_drawn(page, 'Layer 3', lambda d: d['points'] > 0, trace=1)
    assert drawn(page, 'Layer 3')['title'] == first['title']                                # it stays where it was put


@needs_browser
@pytest.mark.slow
def test_a_click_on_the_heat_map_shows_that_pair(stage):
    page = stage.pages['watch_similarity']
    names = [op.name for op in stage.run.space.ops]
    box = page.evaluate('''() => {
        const all = [...document.querySelectorAll('.js-plotly-plot')];
        const g = all.find(g => g.layout?.title?.text?.startsWith('Layer'));
        g.scrollIntoView();
        const r = g.querySelector('.nsewdrag').getBoundingClientRect();
        return [r.x, r.y, r.width, r.height];
    }''')
    x, y, width, height = box
    page.mouse.move(x + width*.375 - 5, y + height*.875)
    page.mouse.move(x + width*.375, y + height*.875)   # column 1, row 3
    page.wait_for_timeout(300)
    page.mouse.click(x + width*.375, y + height*.875)
    shows = '''name => {
        const all = [...document.querySelectorAll('.js-plotly-plot')];
        return all.some(g => g._fullData?.[0]?.name === name);
    }'''
    until(lambda: page.evaluate(shows, f'{names[1]}, {names[3]}'), 30, 'the pair that was clicked')
    until(lambda: f'{names[1]} + {names[3]}' in chosen(page), 20, 'the pair in the list')


@needs_browser
@pytest.mark.slow
def test_merges_threshold_and_veto(stage):
    page = stage.pages['watch_merges']
    def rows(): return page.locator('.nas-merges tbody tr').count()
    wait_drawn(page, 'What if', lambda d: d['points'] > 0, 90)                              # a round was there
    # Nothing is more alike than 1
    assert rows() == 0
    press(page, 'threshold', 'Home')
    until(lambda: 'at 0.30 the newest round' in text(page, '.nas-what-if'), 30, 'what if at 0.30')
    low = text(page, '.nas-what-if')
    press(page, 'threshold', 'End')
    nothing = 'at 1.00 the newest round would have merged 0 pairs'
    until(lambda: nothing in text(page, '.nas-what-if'), 30, 'what if at 1')
    assert low != text(page, '.nas-what-if')
    press(page, 'threshold', 'Home')
    page.wait_for_timeout(500)
    def place():
        return page.evaluate("""() => document.querySelector('.nas-use').getBoundingClientRect().y
            - document.querySelector('.nas-feed').getBoundingClientRect().y""")
    stands = place()
    page.click('.nas-use')
    until(lambda: 'taken: merge above 0.30' in text(page, '.nas-feed'), 60, 'the threshold, taken')
    assert stage.run.events('control').merge_threshold.iloc[-1] == .3
    until(lambda: 'Taken by the run at step' in text(page, '.nas-state'), 20, 'what is asked, taken')
    until(lambda: rows() > 0, 90, 'a merge, because it was asked for')
    first = rows()
    until(lambda: rows() > first, 90, 'more merges')
    until(lambda: chosen(page), 20, 'a pair to veto')
    pairs = [chosen(page)]
    page.click('.nas-veto')
    pairs.append(chosen(page))            # a round may have come between the look and the click, with another pair
    until(lambda: 'keep apart' in text(page, '.nas-feed'), 60, 'the veto, taken')
    layer, a, b = stage.run.events('control').vetoes.iloc[-1][0]
    assert any(f'layer {layer}: {a} + {b}' in pair for pair in pairs)
    until(lambda: page.inner_text('.nas-veto') == 'Lift veto', 20, 'another label')
    assert place() == stands                                     # the feed has grown, the buttons have not moved


@needs_browser
@pytest.mark.slow
def test_pictures(stage, tmp_path):
    "The three companions next to a live run, in both themes: README's pictures, when `make pictures` asks for them."
    if PICTURES:
        until(lambda: len(stage.run.events('round')) >= 7, 900, 'seven rounds')
        moves = [('watch_similarity', 'round', 'ArrowLeft', 1), ('watch_similarity', 'threshold', 'ArrowLeft', 15),
                 ('watch_merges', 'threshold', 'ArrowRight', 7)]
        for name, slider, key, times in moves:
            for _ in range(times):
                press(stage.pages[name], slider, key)
        for page in stage.pages.values():
            page.wait_for_timeout(2000)
    assert stage.run.status == 'running'
    for name in COMPANIONS:
        stage.pages[name].bring_to_front()
        files = photograph(stage.pages[name], Path(PICTURES or tmp_path)/name)
        dark, light = (Image.open(f).convert('L') for f in files)
        assert min(light.size) > 300 and len(light.getcolors(256)) > 100                     # something is drawn
        assert ImageStat.Stat(light).mean[0] > 200 > 100 > ImageStat.Stat(dark).mean[0]       # figures and all


@needs_browser
@pytest.mark.slow
def test_stop_ends_the_run_with_a_checkpoint(stage):
    page = stage.pages['watch_filter']
    page.click('.nas-stop')
    until(lambda: 'Really stop?' in page.inner_text('.nas-stop'), 20, 'the question')
    page.click('.nas-stop')
    until(lambda: 'stopped asked to stop' in ' '.join(text(page, '.nas-status').split()), 60, 'stopped')
    until(lambda: 'taken: stop' in text(page, '.nas-feed'), 20, 'the stop in the feed')
    assert stage.job.wait(90) == 0
    assert stage.run.status == 'stopped' and stage.run.checkpoint()[0] == stage.run.events('stop').step.iloc[-1] > 0


@needs_browser
@pytest.mark.slow
def test_a_killed_run_shows_as_dead(stage):
    "Started again it goes on, and every watcher notices; killed, it is dead."
    stage.start()
    page = stage.pages['watch_merges']
    until(lambda: page.locator('.nas-status').first.get_attribute('data-status') == 'running', 120, 'running again')
    pid = json.loads((stage.run_dir/'heartbeat').read_text())['pid']
    until(lambda: 'resumed' in text(page, '.nas-feed'), 30, 'the resume in the feed')
    os.kill(pid, signal.SIGKILL)
    until(lambda: page.locator('.nas-status').first.get_attribute('data-status') == 'dead', 30, 'dead')
    assert 'is gone' in text(page, '.nas-status')
    stage.job.wait(60)


@needs_browser
@pytest.mark.slow
def test_hostile_names_are_text_and_all_tabs_live(stage):
    "Chosen from the list of runs: HTML in every name is shown letter by letter, and nothing of it happens."
    page = stage.pages['board']
    name = HTML.replace('/', '')
    row = page.locator('.nas-runs tbody tr', has_text=name)
    until(lambda: row.get_attribute('data-state') == 'stopped', 30, 'the run in the table')
    row.click()
    until(lambda: HTML in text(page, '.nas-status') and HTML in text(page, '.nas-feed'), 30, 'the name as text')
    wait_drawn(page, 'Acceptance', lambda d: True)
    for tab, title in [('Similarity', 'Layer 0'), ('Merges', 'Merges')]:
        page.click(f'.lm-TabBar-tabLabel:text-is("{tab}")')
        wait_drawn(page, title, lambda d: d['points'] > 0)
    assert HTML in page.inner_text('.nas-merges')
    page.click('.lm-TabBar-tabLabel:text-is("Similarity")')
    assert HTML in page.evaluate("() => [...document.querySelectorAll('.ytick')].map(t => t.textContent)")
    page.wait_for_timeout(500)
    assert page.evaluate('() => window.hacked') is None
    assert page.locator('.widget-tab img, .nas-status img, .nas-runs img, .nas-feed img').count() == 0
    # On a busy machine; they are healed
    assert not [e for e in stage.errors if '[anywidget] Failed to initialize' not in e]


@needs_browser
@pytest.mark.slow
def test_a_reloaded_page_shows_the_figures_again(stage):
    page = stage.pages['watch_filter']
    # A page that was never saved has no outputs
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.reload()
    page.wait_for_selector('.jp-Notebook .jp-Cell', timeout=60_000)
    wait_drawn(page, 'Acceptance', lambda d: d['points'] > 0, 90)
