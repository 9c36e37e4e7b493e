"A page that is left open: figures of a live run in JupyterLab, whatever happens to the window, and the table of runs."
import os
import re
import time

import pytest

from browser import chromium, jupyter_lab, missing, notebook, open_notebook, run_cells
from conftest import until
from geometry import Recorder, Traffic, faint, wrong
from test_widgets import COMPANIONS, SLOW_TOY, Stage, drawn, some_run, text, wait_drawn

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or 'there is a browser')
# Sides of a window, in px. At the last the sidebar is closed, or there would be no room for a figure next to it.
WINDOWS = (1440, 900), (1100, 900), (820, 1100), (620, 1000)
# `make accept`: all companions and the dashboard, for a minute of a live run. Otherwise one dashboard
ACCEPT = os.environ.get('GREEDYNASV2_ACCEPT', '') not in ('', '0')
# A round every second or so, with merges now and then
LIVELY_TOY = {**SLOW_TOY, 'merge_threshold': .9, 'max_merges': 1}


def lab(page, command, **given):
    "Execute a command of JupyterLab."
    page.evaluate('([name, given]) => { window.jupyterapp.commands.execute(name, given) }', [command, given])


def set_theme(page, theme):
    "JupyterLab's light or dark theme, when it is there."
    lab(page, 'apputils:change-theme', theme=f'JupyterLab {theme.capitalize()}')
    page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=str(theme == 'light').lower())


def set_sidebar(page, shown):
    "Show or hide JupyterLab's file browser."
    page.evaluate("shown => window.jupyterapp.shell[shown ? 'expandLeft' : 'collapseLeft']()", shown)


def tabs_of(page):
    "Names of the tabs of a dashboard on the page; of a companion: one, which has no name."
    return page.locator('.widget-tab .lm-TabBar-tabLabel').all_inner_texts() or ['']


def show_tab(page, tab):
    "Click on a tab, if there are tabs."
    if tab:
        page.click(f'.widget-tab .lm-TabBar-tabLabel:text-is("{tab}")')


def rounds_of(run): return len(run.events('round'))


def go_through(page, name, run, folder, seconds):
    "All windows, themes, tabs and the sidebar while `run` goes on, for `seconds` or more; a recorder that watched."
    recorder = Recorder(page)
    begin, first = time.monotonic(), rounds_of(run)
    for width, height in WINDOWS:
        recorder.label(f'{name}, becoming {width} px wide')
        page.set_viewport_size(dict(width=width, height=height))
        for theme in 'light', 'dark':
            recorder.label(f'{name}, {width} px, becoming {theme}')
            set_theme(page, theme)
            for tab in tabs_of(page):
                show_tab(page, tab)
                at = f'{name} {tab}'.strip() + f', {width} px, {theme}'
                recorder.look(at, max(1.5, seconds/24))
                page.screenshot(path=folder/f'{at.replace(", ", "_").replace(" ", "_")}.png')
                if theme == 'dark':
                    continue
                for shown in [False] if width < 700 else [True, False]:
                    recorder.label(f'{at}, sidebar {"shown" if shown else "hidden"}')
                    set_sidebar(page, shown)
                    recorder.look(f'{at}, sidebar {"shown" if shown else "hidden"}', 2)
    while time.monotonic() - begin < seconds or rounds_of(run) < first + 3:
        for tab in tabs_of(page):
            show_tab(page, tab)
            recorder.look(f'{name} {tab}, left alone', 2)
        assert time.monotonic() - begin < seconds + 120, 'no three rounds in time'
    return recorder


@pytest.fixture(scope='module')
def gallery(tmp_path_factory):
    "A live run, JupyterLab with the notebooks that watch it, and Chromium."
    folder = tmp_path_factory.mktemp('gallery')
    made = Stage(folder, **LIVELY_TOY)
    try:
        with jupyter_lab(folder) as address, chromium() as context:
            until(lambda: (made.run_dir/'events.jsonl').exists(), 120, 'the run')
            yield made, address, context
    finally:
        made.end()


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize('name', [*COMPANIONS, 'board'] if ACCEPT else ['board'])
def test_figures_stand_where_they_should(gallery, name, capsys):
    "Next to a live run, in any window: no figure collapses, no box or text over another, no strange request."
    made, address, context = gallery
    folder = made.folder
    blank = f'blank_{name}'
    notebook(folder/f'{blank}.ipynb', ['1 + 1'])
    if name == 'board':
        notebook(folder/'board.ipynb',
                 ['from greedynasv2.widgets import Dashboard', f'Dashboard(root={str(folder/"runs")!r})'])
    else:
        notebook(folder/f'{name}.ipynb', name, run_dir=str(made.run_dir))
    traffic = {}
    # At the second look a kernel is there, as for the notebook itself
    for source in blank, blank, name:
        page = context.new_page()
        traffic[source] = Traffic(page, traffic.get(source))
        open_notebook(page, address(f'{source}.ipynb'))
        run_cells(page)
        if source == blank:
            for shown in True, False:
                set_sidebar(page, shown)
                page.wait_for_timeout(1500)
            lab(page, 'docmanager:save')               # as JupyterLab does by itself every two minutes
            page.wait_for_timeout(1000)
            page.close()
    page.wait_for_selector('.js-plotly-plot .main-svg', timeout=120_000)
    until(lambda: rounds_of(made.run) > 0, 120, 'a round')
    recorder = go_through(page, name, made.run, folder, 60 if ACCEPT else 40)
    with capsys.disabled():
        print(f'\n  {name}: {recorder.samples} looks, lowest figure {recorder.least:.0f} px, pictures in {folder}')
    assert made.run.status == 'running' and recorder.samples > 200
    assert not recorder.found, '\n'.join(recorder.found)
    assert recorder.least >= 200
    errors = [e for e in traffic[name].errors if e not in traffic[blank].errors]
    assert not errors
    strange = traffic[name].requests - traffic[blank].requests - {'from the page itself'}
    assert not strange, strange
    page.close()


@needs_browser
@pytest.mark.slow
def test_home_by_mouse_and_keyboard(gallery):
    "Runs are chosen and sorted, each has its own panels, and the zoom of one run is not another's."
    made, address, context = gallery
    runs = made.folder/'runs'
    some_run(runs/'uniform paths', dict(method='spos'), steps=200, end='end')
    some_run(runs/'a network, retrained', dict(method='retrain'), steps=50, end='end', loss=1.2, top1=61.5, top5=90.,
             raw_top1=55.)
    some_run(runs/'a detector', dict(detector='fcos'), steps=50, mAP=.25, AP50=.4, AP75=.2)
    notebook(made.folder/'home.ipynb', ['from greedynasv2.widgets import Dashboard', f'Dashboard(root={str(runs)!r})'])
    page = context.new_page()
    open_notebook(page, address('home.ipynb'))
    run_cells(page)
    page.wait_for_selector('.nas-runs tbody tr', timeout=120_000)
    def row(name): return page.locator('.nas-runs tbody tr', has=page.locator(f'td:text-is("{name}")'))
    def names(): return page.locator('.nas-runs tbody tr td:first-child').all_inner_texts()
    def cell(name, column): return row(name).locator(f'td[data-column={column}]').inner_text()
    assert row('live').get_attribute('aria-selected') == 'true' and cell('live', 'state') == 'running'
    step = cell('live', 'step')
    until(lambda: cell('live', 'step') != step, 30, 'the next steps in the table')
    assert cell('a detector', 'state') == 'dead' and cell('a network, retrained', 'acc') == '61.5 top-1'

    page.locator('.nas-runs th button:text-is("run")').click()
    assert names() == sorted(names())
    page.locator('.nas-runs th button:text-is("run")').click()
    assert names() == sorted(names(), reverse=True)

    wait_drawn(page, 'Training', lambda d: d['points'] > 5)
    find = "[...document.querySelectorAll('.js-plotly-plot')].find(g => g.layout?.title?.text === 'Training')"
    def zoomed(): return page.evaluate(f'() => {find}._fullLayout.xaxis.autorange === false')
    box = page.evaluate('() => { const g = ' + find + """;
        g.scrollIntoView({ block: 'center' });
        const r = g.querySelector('.nsewdrag').getBoundingClientRect();
        return [r.x, r.y, r.width, r.height]; }""")
    x, y, width, height = box
    page.mouse.move(x + .3*width, y + .5*height)
    page.mouse.down()
    page.mouse.move(x + .6*width, y + .5*height, steps=8)
    page.mouse.up()
    until(zoomed, 10, 'a zoom')
    before = drawn(page, 'Training')['points']
    until(lambda: drawn(page, 'Training')['points'] > before, 30, 'a redraw')
    assert zoomed()                                              # kept while the run goes on

    row('uniform paths').focus()
    page.keyboard.press('Enter')
    wait_drawn(page, 'Training', lambda d: d['points'] == 200)
    assert not zoomed() and tabs_of(page) == ['Training']        # another run, another figure
    assert 'ended' in text(page, '.nas-status')
    row('a network, retrained').click()
    wait_drawn(page, 'Retraining', lambda d: d['points'] == 50)
    assert '61.50 %' in text(page, '.nas-note')
    row('a detector').click()
    wait_drawn(page, 'Detection', lambda d: d['points'] == 50)
    assert 'Last heard of at' in text(page, '.nas-status') and page.locator('.nas-stop').is_disabled()
    assert 'nothing to stop' in page.locator('.nas-stop').get_attribute('title')
    row('live').click()
    def age(): return re.search(r'heartbeat (\d+) s ago', text(page, '.nas-status'))[1]
    until(lambda: 'heartbeat' in text(page, '.nas-status'), 20, 'the live run')
    first = age()
    until(lambda: age() != first, 10, 'a heartbeat that ticks')
    until(lambda: len(tabs_of(page)) == 3, 20, 'all tabs')
    wait_drawn(page, 'Acceptance', lambda d: d['points'] > 0)
    for theme in 'dark', 'light':
        set_theme(page, theme)
        page.wait_for_timeout(1500)
        assert not wrong(page) and not faint(page)
        page.screenshot(path=made.folder/f'home_{theme}.png')
    page.close()
