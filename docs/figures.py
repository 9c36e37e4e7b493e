"Draw the figures that README.md shows, with a headless Chromium: python docs/figures.py [name ...]"
import json
import sys
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT/'studies'), str(ROOT/'tests')]
from browser import chromium
from greedynasv2.spaces import GREEDYNAS_B, get_space
from greedynasv2.viz import COLOURS, plot_curves, plot_intervals, plot_path, plot_space
from greedynasv2_studies.claims import rank_curves, tau_bars

IMG = ROOT/'docs'/'img'


def plot_benchmark(found):
    "Where the time of a step goes, and how the cost of everything grows with the space."
    titles = 'a training step, by part', 'more ops in 20 layers', 'more layers of 13 ops'
    fig = make_subplots(1, 3, subplot_titles=titles, horizontal_spacing=.1)
    spent = pd.Series(found['profile']).sort_values()
    text = [f'{1000 * v:.1f} ms' for v in spent]
    bars = go.Bar(x=100 * spent / spent.sum(), y=spent.index, orientation='h', text=text, showlegend=False)
    fig.add_trace(bars, 1, 1)
    sizes = pd.DataFrame(found['sizes'])
    for column, axis in (2, 'n_ops'), (3, 'n_layers'):
        groups = sizes[sizes['axis'] == axis].groupby('what')
        for colour, (what, rows) in zip(COLOURS, groups, strict=False):       # more colours than groups
            fig.add_trace(go.Scatter(x=rows['size'], y=rows.ratio, name=what, mode='lines+markers', line_color=colour,
                                     legendgroup=what, showlegend=column == 2), 1, column)
        fig.update_xaxes(title=axis[2:], row=1, col=column)
        fig.update_yaxes(title='price, relative to the smallest', range=[0, 10.5], row=1, col=column)
    fig.update_xaxes(title='share of a step (%)', row=1, col=1)
    legend = dict(orientation='h', y=-.22, yanchor='top', x=.42, xanchor='left')
    margin = dict(t=40, l=80, r=20, b=100)
    return fig.update_layout(template='greedynasv2', height=380, legend=legend, margin=margin)


def path():
    space = get_space('mbse')
    rows = space.rows(space.encode(GREEDYNAS_B))
    costs = f'{rows.flops.sum():,} multiply-adds, {rows.params.sum():,} params'
    return plot_path(rows, title=f'GreedyNAS-B, a path of MB-SE: {costs}')


def space():
    space = get_space('mbse')
    paths = space.sample(20_000, torch.Generator().manual_seed(0))
    title = 'MB-SE: 13 ops in each of 21 layers'
    return plot_space(space.costs(), space.table(paths), limit=space.max_flops, title=title)


def benchmark(): return plot_benchmark(json.loads((ROOT/'results'/'benchmark.json').read_text()))


def _reproduced(key):
    "One part of what was measured about every run of the reproduction."
    runs = json.loads((ROOT/'results'/'nasbench_macro.json').read_text())['runs']
    return {name: run[key] for name, run in runs.items()}


def ranks():
    curves = rank_curves(_reproduced('rank'))
    title = 'Paths that were trained, ranked by benchmark accuracy'
    fig = plot_curves(curves, 'epoch', 'mean percentile rank (0 is best)', title)
    return fig.update_layout(height=400, yaxis_rangemode='tozero')


def tau():
    title = "Kendall's tau in the benchmark's top 10 %, with 95 % bootstrap intervals"
    return plot_intervals(tau_bars(_reproduced('tau')), 'tau', 'tau (%)', title).update_layout(height=360)


FIGURES = dict(path=path, space=space, benchmark=benchmark)
if (ROOT/'results'/'nasbench_macro.json').exists():
    FIGURES |= dict(ranks=ranks, tau=tau)


def photograph(context, fig, height:int) -> bytes:
    "A PNG of a figure, drawn by a browser."
    page = context.new_page()
    page.set_viewport_size(dict(width=1000, height=height))
    html = fig.to_html(full_html=False, config=dict(displayModeBar=False))
    page.set_content('<body style="margin:0;background:white">' + html)
    page.wait_for_selector('.js-plotly-plot .main-svg')
    page.wait_for_timeout(500)
    return page.screenshot()


def main(*names):
    "Write docs/img/NAME.png for every figure, or for those that are named."
    with chromium(viewport=dict(width=1000, height=600), device_scale_factor=1.5) as context:
        for name in names or FIGURES:
            fig = FIGURES[name]()
            (IMG/f'{name}.png').write_bytes(photograph(context, fig, int(fig.layout.height)))


if __name__ == '__main__':
    main(*sys.argv[1:])
