"Draw the figures that README.md shows, with a headless Chromium: python docs/figures.py"
import shutil
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from greedynasv2.spaces import GREEDYNAS_B, get_space
from greedynasv2.viz import plot_path, plot_space

IMG = Path(__file__).parent/'img'
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-component-update',
         '--disable-sync', '--no-first-run']


def figures():
    "Name and figure of each picture."
    space = get_space('mbse')
    rows = space.rows(space.encode(GREEDYNAS_B))
    yield 'path', plot_path(rows, title=f'GreedyNAS-B, a path of MB-SE: {rows.flops.sum():,} multiply-adds, {rows.params.sum():,} params')
    paths = space.sample(20_000, torch.Generator().manual_seed(0))
    yield 'space', plot_space(space.costs(), space.table(paths), limit=space.max_flops, title='MB-SE: 13 ops in each of 21 layers')


def main():
    "Write docs/img/NAME.png for every figure."
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which('chromium'), args=FLAGS)
        for name, fig in figures():
            page = browser.new_page(viewport=dict(width=1000, height=int(fig.layout.height)), device_scale_factor=1.5)
            page.set_content('<body style="margin:0;background:white">' + fig.to_html(full_html=False, config=dict(displayModeBar=False)))
            page.wait_for_selector('.js-plotly-plot .main-svg')
            page.wait_for_timeout(500)
            page.screenshot(path=IMG/f'{name}.png')


if __name__ == '__main__': main()
