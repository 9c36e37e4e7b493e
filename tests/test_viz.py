"Every figure of the library in a browser, at every width that a page gives it: where its text stands."
import inspect

import numpy as np
import pandas as pd
import pytest

import geometry
from browser import chromium, missing
from greedynasv2 import viz

needs_browser = pytest.mark.skipif(bool(missing()), reason=missing() or 'there is a browser')
WIDTHS = 400, 430, 520, 620, 820, 1100, 1400
OPS = ['ID'] + [f'MB{ratio}_K{kernel}{se}' for se in ('', '_SE') for ratio in (3, 6) for kernel in (3, 5, 7)]
N_LAYERS, N_ROUNDS = 21, 12


def rounds():
    "What a run of twelve rounds logs about them."
    rng, r = np.random.default_rng(0), np.arange(N_ROUNDS)
    return pd.DataFrame({
        'round': r, 'step': 400 + 200*r, 'q': np.linspace(.5, .95, N_ROUNDS), 'kept': np.linspace(.52, .06, N_ROUNDS),
        'u': [np.nan, *np.linspace(.6, .95, N_ROUNDS - 1)], 'kappa': [np.nan, *np.linspace(.2, .8, N_ROUNDS - 1)],
        'filter_loss': -np.linspace(.1, .6, N_ROUNDS), 'valid_loss': -np.linspace(.05, .4, N_ROUNDS),
        'verdict': [''] * (N_ROUNDS - 1) + ['it rejects everything'], 'ops': 273 - 8*r,
        'log10_size': np.linspace(23.4, 16, N_ROUNDS), 'phi': [rng.integers(0, 900, 20).tolist() for _ in r]})


def ops_of_layers():
    "A row for each op of each layer of a space as large as the paper's small one."
    table = pd.DataFrame([dict(layer=layer, op=op) for layer in range(N_LAYERS) for op in OPS])
    cost = table.op.map(OPS.index)*(1 + table.layer)
    return table.assign(flops=1e6*cost, alive=cost % 7 != 5, round=3)


def merges():
    "Decisions of every kind, and one of a kind that is not known."
    kinds = [*viz.DECISIONS, 'filter not trusted']
    rows = [dict(round=i // 2, layer=(7*i) % N_LAYERS, kept='MB3_K3', removed='MB6_K7_SE', similarity=.9,
                 decision=kinds[i % len(kinds)])
            for i in range(2*N_ROUNDS)]
    return pd.DataFrame(rows)


def pairs():
    "Long names of six pairs over the rounds."
    rng = np.random.default_rng(0)
    names = [f'MB6_K{kernel}_SE, MB3_K{kernel}{se}' for kernel in (3, 5, 7) for se in ('', '_SE')]
    rows = [dict(round=r, pair=name, similarity=rng.uniform(-1, 1)) for name in names for r in range(N_ROUNDS)]
    return pd.DataFrame(rows)


def labelled(column, low, high, labels):
    "A number with a label, for histograms."
    rng = np.random.default_rng(0)
    return pd.DataFrame({column: rng.uniform(low, high, 1000), 'label': rng.choice(labels, 1000)})


def network():
    "The rows of a network of 21 layers."
    row = dict(kernel='3', ratio=3., se=True, c_in=16, c_out=32, stride=1, flops=2_000_000, params=4_000)
    rows = []
    for layer in range(N_LAYERS):
        rows.append(row | dict(layer=layer, op=OPS[layer % len(OPS)], size=224 // (1 + layer // 4)))
    return pd.DataFrame(rows)


def samples():
    "Each `plot_*` of viz by name, drawn from as much as a real run gives it."
    rng = np.random.default_rng(0)
    steps = pd.DataFrame(dict(step=range(0, 26_000, 50), loss=1 + np.exp(-np.arange(520)/300),
                              images_per_s=rng.uniform(250, 1300, 520)))
    tests = pd.DataFrame(dict(step=range(0, 26_000, 2000), loss=np.linspace(2, .9, 13), top1=np.linspace(20, 75, 13),
                              top5=np.linspace(40, 95, 13), raw_top1=np.linspace(18, 74, 13)))
    detected = pd.DataFrame(dict(step=range(0, 26_000, 2000), mAP=np.linspace(.02, .4, 13),
                                 AP50=np.linspace(.1, .6, 13), AP75=np.linspace(0, .3, 13)))
    accept = pd.DataFrame(dict(step=range(0, 2600, 50), rate=rng.uniform(.1, 1, 52)))
    cosines = rng.uniform(-1, 1, (len(OPS), len(OPS)))
    trials = pd.DataFrame(dict(threshold=np.arange(.3, 1.001, .025), merges=np.linspace(27, 0, 29).round(),
                               log10_size=np.linspace(18, 23.4, 29)))
    searched = pd.DataFrame(dict(path=['0'*N_LAYERS]*200, acc=rng.uniform(40, 75, 200),
                                 flops=rng.uniform(1e8, 6e8, 200)))
    share = np.linspace(0, 1, 11)
    confidence = pd.concat([pd.DataFrame(dict(p=share, k=k, confidence=share**(1/k))) for k in (1, 5, 10, 20)])
    recall = np.arange(50, 101, 10)
    curves = pd.concat([pd.DataFrame(dict(share=s, recall=recall, precision=100 - recall/9)) for s in (.1, .3, .5, 1.)])
    x = np.arange(10)
    methods = 'random search', 'regularised evolution', 'NSGA-II', 'NSGA-II through the filter'
    lines = [dict(method=m, x=x, mean=x + i, low=x + i - 1, high=x + i + 1) for i, m in enumerate(methods)]
    progress = pd.concat(map(pd.DataFrame, lines))
    history = pd.DataFrame(dict(step=range(200), var_loss=-rng.random(200), valid_loss=-rng.random(200)))
    labels = ['uniform', 'kept by the filter of the last round']
    intervals = {f'a pair of ops, {i}': dict(tau=30. + i, low=25., high=40.) for i in range(6)}
    return dict(
        plot_space=viz.plot_space(ops_of_layers(), searched, 4e8),
        plot_path=viz.plot_path(network()),
        plot_confidence=viz.plot_confidence(confidence, 1000),
        plot_filter_history=viz.plot_filter_history(history),
        plot_phi=viz.plot_phi(labelled('phi', 0, 1,
                                       ['the best 10 % of the paths', 'the worst 50 % of the paths', 'those between'])),
        plot_phi_rounds=viz.plot_phi_rounds(rounds()),
        plot_filter_losses=viz.plot_filter_losses(rounds()),
        plot_precision_recall=viz.plot_precision_recall(curves),
        plot_steps=viz.plot_steps(steps),
        plot_acceptance=viz.plot_acceptance(accept, rounds()),
        plot_agreement=viz.plot_agreement(rounds()),
        plot_similarity=viz.plot_similarity(cosines, OPS, .5, 'Layer 12, round 10: similarity of ops'),
        plot_pairs=viz.plot_pairs(pairs()),
        plot_merges=viz.plot_merges(merges()),
        plot_size=viz.plot_size(rounds()),
        plot_what_if=viz.plot_what_if(trials, .75, now=.8),
        plot_alive=viz.plot_alive(ops_of_layers()),
        plot_ranks=viz.plot_ranks(labelled('rank', 0, 100, labels)),
        plot_nothing=viz.plot_nothing('Similarities are known after the first round whose filter passes validation.',
                                      'Two successive filters'),
        plot_retraining=viz.plot_retraining(steps, tests),
        plot_detection=viz.plot_detection(steps, detected),
        plot_pareto=viz.plot_pareto(searched, searched.sort_values('acc').tail(3), 4e8),
        plot_scores=viz.plot_scores(labelled('score', 40, 75, labels)),
        plot_curves=viz.plot_curves(progress, 'evaluations', 'best accuracy so far (%)', 'How fast'),
        plot_intervals=viz.plot_intervals(intervals, 'tau', 'tau (%)', 'Intervals'))


def test_every_figure_has_a_sample():
    "A new `plot_*` needs a sample here."
    drawn = {name for name, f in vars(viz).items() if name.startswith('plot_') and inspect.isfunction(f)}
    assert drawn == set(samples())


def test_no_figure_has_a_button_that_uploads_it():
    "plotly's modebar offers to share a chart by its cloud."
    buttons = [b for group in viz.BUTTONS['modeBarButtons'] for b in group]
    assert 'sendChartToCloud' not in buttons and viz.BUTTONS['showSendToCloud'] is False


@pytest.fixture(scope='module')
def page(tmp_path_factory):
    "An empty page that knows plotly.js."
    from plotly.offline import get_plotlyjs
    path = tmp_path_factory.mktemp('page')/'page.html'
    path.write_text(f'<body style="margin:0"><script>{get_plotlyjs()}</script></body>')
    with chromium(viewport=dict(width=max(WIDTHS), height=900)) as context:
        made = context.new_page()
        made.goto(path.as_uri())
        yield made


DRAW = '''async ([spec, width, height, buttons]) => {
    const box = document.createElement('div');
    box.style.width = `${width}px`;
    box.style.height = `${height}px`;
    document.body.replaceChildren(box);
    const { data, layout } = JSON.parse(spec);
    await Plotly.newPlot(box, data, { ...layout, width, height }, buttons);
}'''


@needs_browser
@pytest.mark.slow
def test_text_never_stands_on_text(page):
    "Title, legend, axis titles, ticks of different axes, annotations, colour bars and buttons, 400 to 1400 px wide."
    found = []
    for name, fig in samples().items():
        for width in WIDTHS:
            height = fig.layout.height or fig.layout.template.layout.height
            page.evaluate(DRAW, [fig.to_json(), width, height, viz.BUTTONS])
            n_texts = len(geometry.figures(page)[0]['texts'])
            assert n_texts > 2, name
            found += [f'{name}, {width} px: {sentence}' for sentence in geometry.wrong(page)]
    assert not found, '\n'.join(found)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize('background, least', [('#ffffff', 4.5), ('#111111', 4.0)])
def test_text_can_be_read(page, background, least):
    "Contrast of all text; no grey reaches 4.5 on white and on JupyterLab's dark background (live: the theme's)."
    page.evaluate('colour => { document.body.style.background = colour }', background)
    for name, fig in samples().items():
        page.evaluate(DRAW, [fig.to_json(), 620, 400, viz.BUTTONS])
        assert not geometry.faint(page, least), name


def test_lines_differ_in_more_than_colour():
    "Dash or marker of every line, hatching of every histogram."
    for name, fig in samples().items():
        lines = [t for t in fig.data if t.type == 'scatter' and t.name and t.showlegend is not False]
        looks = [(t.mode, t.line.dash, t.line.width, str(t.marker.symbol), t.yaxis, t.line.shape) for t in lines]
        assert len(set(looks)) == len(looks), (name, looks)
        bars = [t for t in fig.data if t.type == 'histogram' and t.name]
        assert len({t.marker.pattern.shape for t in bars}) == len(bars), name
