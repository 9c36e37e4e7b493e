"""Photograph the widgets in JupyterLab, at work on a real run of MB-SE: python docs/screenshots.py [run folder]

Without a folder, a run is started (the demo recipe with more rounds, minutes on two cores) and photographed while it goes on.
"""
import sys, tempfile, time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/'tests')]
from browser import chromium, jupyter_lab, notebook, open_notebook, run_cells

from greedynasv2.runs import Run
from greedynasv2.widgets import start_run

IMG = ROOT/'docs'/'img'
# Ten rounds instead of four, and a lower threshold: at 0.8 a filter of 16 values merges nothing in so short a run
DEMO = dict(recipe='demo', space='mbse', epochs=36, warmup_epochs=6, round_every=3, m=600, merge_threshold=.65, stop_rule='none')


def real_run(enough=6):
    "A run of MB-SE in another process, once it has gone through enough rounds."
    folder = start_run(run_dir=str(ROOT/'runs'/time.strftime('mbse-demo-%H%M%S')), **DEMO)
    print(f'{folder}: waiting for {enough} rounds ...')
    while len(Run.open(folder).events('round')) < enough and Run.open(folder).status == 'running': time.sleep(2)
    return folder


def photograph(page, name, themes=('light', 'dark')):
    "The widget as it is on the page, in both themes."
    for theme in themes:
        label = f'JupyterLab {theme.title()}'
        page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", label)
        page.wait_for_timeout(1500)
        box = page.locator('.jp-OutputArea-output > .widget-vbox').first
        box.scroll_into_view_if_needed()
        box.screenshot(path=IMG/f'{name}{"" if theme == "light" else "_dark"}.png')


def main(folder=None):
    "Write docs/img/watch_*.png."
    folder = Path(folder).resolve() if folder else real_run()
    with tempfile.TemporaryDirectory() as tmp, jupyter_lab(Path(tmp)) as address, \
            chromium(viewport=dict(width=1240, height=1900), device_scale_factor=1.5) as context:
        page = context.new_page()
        for name in ('watch_filter', 'watch_similarity', 'watch_merges'):
            notebook(Path(tmp)/f'{name}.ipynb', name, run_dir=str(folder))
            open_notebook(page, address(f'{name}.ipynb'))
            run_cells(page)
            page.wait_for_selector('.js-plotly-plot .main-svg', timeout=120_000)
            page.wait_for_timeout(3000)
            if name == 'watch_similarity':
                for slider, key, times in [('layer', 'ArrowRight', 2), ('round', 'ArrowLeft', 3), ('threshold', 'ArrowLeft', 15)]:
                    for _ in range(times): page.locator(f'.nas-{slider} .noUi-handle').first.press(key)
            if name == 'watch_merges':
                for _ in range(7): page.locator('.nas-threshold .noUi-handle').first.press('ArrowRight')
            page.wait_for_timeout(2000)
            photograph(page, name)
            print(name)


if __name__ == '__main__': main(*sys.argv[1:2])
