"The numbers that others have published, to the last digit, and properties that hold for every space."
import math
import random

import pytest
import torch

from greedynasv2.core import InputError
from greedynasv2.spaces import SPACES, SearchSpace, get_space, register_space

FIVE = ['mbse', 'mbse_mix', 'mbse_mix_shuffle', 'res50se', 'nasbench_macro']
GREEDYNAS_B = ('MB3_K5_SE MB3_K5_SE MB3_K5_SE ID MB3_K5_SE MB3_K7_SE MB3_K5_SE MB3_K3 MB6_K5 ID MB3_K7_SE '
               'MB3_K7_SE MB3_K3_SE MB3_K5 MB3_K5 MB3_K7_SE MB6_K5_SE MB3_K7_SE MB3_K3_SE MB3_K7_SE MB6_K7_SE').split()


@pytest.mark.parametrize('name, n_params', [
    ('mbse', 45_671_740), ('mbse_mix', 60_299_304), ('mbse_mix_shuffle', 61_456_524)])
def test_supernet_params(name, n_params):
    "The table's sum, and the parameters of the modules that are really built."
    from greedynasv2.supernet import SuperNet
    space = get_space(name)
    with torch.device('meta'):
        net = SuperNet(space)
    assert space.n_params == net.n_params == n_params


def test_res50se_supernet_params():
    "About 810M, and the table agrees with the modules."
    from greedynasv2.supernet import SuperNet
    space = get_space('res50se')
    with torch.device('meta'):
        net = SuperNet(space)
    assert space.n_params == net.n_params
    assert round(space.n_params/1e6) == 810


@pytest.mark.parametrize('name, ops, params, flops', [
    ('mbse', GREEDYNAS_B, 5_207_804, 323_520_704),
    ('mbse_mix', GREEDYNAS_B, 5_207_804, 323_520_704),
    ('res50se', ['ResNet_K3_1x']*16, 30_603_912, 4_094_214_144)])
def test_published_networks(name, ops, params, flops):
    "GreedyNAS-B and SE-ResNet-50: by table, and counted by torch on the standalone network."
    from greedynasv2.blocks import count_cost
    from greedynasv2.supernet import SuperNet
    space = get_space(name)
    path = space.encode(ops)
    assert (int(space.params(path)), int(space.flops(path))) == (params, flops)
    with torch.device('meta'):
        counted = count_cost(SuperNet(space).subnet(path), 3, 224)
    assert counted == (flops, params)


@pytest.mark.parametrize('name, n_layers, n_ops', [
    ('mbse', 21, 13), ('mbse_mix', 21, 17), ('mbse_mix_shuffle', 21, 21),
    ('res50se', 16, 19), ('nasbench_macro', 8, 3)])
def test_sizes(name, n_layers, n_ops):
    "Table 1 of the paper."
    space = get_space(name)
    assert (space.n_layers, space.n_ops, space.size) == (n_layers, n_ops, n_ops**n_layers)
    assert space.ops[0].name == 'ID'


def test_nasbench_macro_is_exact(data_file):
    "Params and FLOPs of all 6561 networks are the benchmark's own; 3969 of them are distinct."
    from greedynasv2.nasbench import MACRO_FILE, MACRO_URL, load_macro
    data_file(MACRO_FILE, MACRO_URL)
    macro, space = load_macro(), get_space('nasbench_macro')
    paths = space.encode(macro.path)
    assert len(macro) == 6561
    assert space.params(paths).tolist() == macro.params.tolist()
    assert space.flops(paths).tolist() == macro.flops.tolist()
    keys = space.decode(space.canonical(paths), compact=True)
    assert len(set(keys)) == 3969
    assert (macro.groupby(keys).mean_acc.nunique() == 1).all()
    best = space.canonical(paths[int(macro.mean_acc.idxmax())])
    assert torch.equal(best, space.canonical(space.encode('22212220'))) and round(macro.mean_acc.max(), 2) == 93.13


@pytest.mark.parametrize('name', [*FIVE, 'toy'])
def test_every_op_counted_by_torch(name):
    "Analytic cost = torch's flop counter, for every op of every layer, stem and head included."
    from greedynasv2.blocks import build, check_costs, count_cost
    space = get_space(name)
    assert check_costs(space) == {}
    for op, layer in space.stem + space.head:
        with torch.device('meta'):
            assert count_cost(build(op, layer), layer.c_in, layer.size) == op.cost(layer)


@pytest.mark.parametrize('name', FIVE)
@pytest.mark.parametrize('change', [dict(image_size=33), dict(width=.5), dict(width=1.4, image_size=160, n_classes=7)])
def test_whole_network_counted_by_torch(name, change):
    "Any size, width and number of classes: a random network costs what the table says."
    from greedynasv2.blocks import count_cost
    from greedynasv2.supernet import SuperNet
    space = get_space(name, **change)
    with torch.device('meta'):
        net = SuperNet(space)
    for path in space.sample(2, torch.Generator().manual_seed(0)):
        assert count_cost(net.subnet(path), 3, space.image_size) == (int(space.flops(path)), int(space.params(path)))


@pytest.mark.parametrize('name', SPACES)
def test_paths_round_trip(name):
    "Names, strings, JSON: what goes out comes back, also after random drops; what was dropped is never sampled."
    space, rng = get_space(name), random.Random(0)
    for _ in range(space.n_ops*space.n_layers // 2):
        layer, op = rng.randrange(space.n_layers), rng.randrange(space.n_ops)
        if space.alive[layer].sum() > 1:
            space.drop(layer, op)
    paths = space.sample(200, torch.Generator().manual_seed(0))
    assert space.alive[torch.arange(space.n_layers), paths].all()
    assert torch.equal(space.encode(space.decode(paths)), paths)
    assert torch.equal(space.encode(space.decode(paths, compact=True)), paths)
    again = SearchSpace.from_json(space.to_json())
    assert again == space and torch.equal(again.alive, space.alive)
    assert again.size == space.size == math.prod(space.alive.sum(1).tolist())
    assert torch.equal(space.canonical(space.canonical(paths)), space.canonical(paths))
    assert torch.equal(space.flops(space.canonical(paths)), space.flops(paths))


def test_any_integers_are_paths():
    "Lists, NumPy and every integer type mean the same path; no paths at all are fine too."
    space = get_space('toy')
    path = torch.tensor([1, 2, 0, 3])
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.uint16, torch.uint64):
        assert torch.equal(space.check(path.to(dtype)), path)
    assert torch.equal(space.check(path.numpy().astype('int16')), path)
    none = space.sample(0)
    assert len(space.table(none)) == 0 and space.encode(space.decode(none)).shape == (0, 4)


@pytest.mark.parametrize('ops, rows, size', [
    (['ID', 'MB3_K3'], [('choice', 16, 2, 2)], 8),                                # neither stem nor head
    (['MB3_K5_SE'], [('Conv_K3', 8, 1, 1), ('choice', 16, 2, 2)], 1),             # one op, one pixel
    (['ID'], [('choice', 3, 2, 1)], 4)])                                          # nothing at all to compute
def test_smallest_spaces(ops, rows, size):
    "Counted, built, evaluated and drawn like the large ones."
    from greedynasv2.blocks import check_costs
    from greedynasv2.supernet import SuperNet, SupernetEvaluator
    from greedynasv2.viz import plot_path, plot_space
    space = SearchSpace('smallest', ops, rows, image_size=size, n_classes=3)
    paths, x = space.sample(3), torch.randn(4, 3, size, size)
    assert check_costs(space) == {}
    scores = SupernetEvaluator(SuperNet(space), x, torch.tensor([0, 1, 2, 0]))(paths)
    assert scores.loss.isfinite().all()
    plot_path(space.rows(paths[0]))
    plot_space(space.costs(), space.table(paths))


def test_sampling_is_uniform():
    "Every alive op of every layer comes equally often, before and after drops."
    space = get_space('mbse')
    for drop in [(), (0, 3, 12)]:
        for op in drop:
            space.drop(5, op)
        paths = space.sample(130_000, torch.Generator().manual_seed(1))
        counts = torch.stack([(paths == op).sum(0) for op in range(13)], 1).double()
        expected = 130_000 / space.alive.sum(1, keepdim=True)
        assert ((counts - expected)[space.alive].abs() < 5*expected.sqrt().expand_as(counts)[space.alive]).all()
        assert (counts[~space.alive] == 0).all()


def test_limit_is_meant_at_the_native_size():
    "Training at 32 px moves neither the limit nor the size at which it is meant."
    space = get_space('mbse', image_size=32)
    assert (space.max_flops, space.native_size) == (330_000_000, 224)
    path = space.encode(GREEDYNAS_B)
    assert int(space.flops(path, space.native_size)) == int(get_space('mbse').flops(path))
    assert get_space('nasbench_macro').max_flops is None and get_space('res50se').max_flops == 4_100_000_000


def test_own_space_travels_by_name():
    "A registered space is fresh each time, takes changes, and cannot shadow a built-in one."
    own = SearchSpace('own', ['ID', 'MB3_K3'], [('Conv_K3', 8, 1, 1), ('choice', 16, 3, 2)], n_classes=4, image_size=16)
    register_space('own', own)
    get_space('own').drop(0, 0)
    assert get_space('own').size == 8
    assert get_space('own', image_size=32).image_size == 32 and get_space('own', image_size=32).native_size == 16
    with pytest.raises(InputError, match='built-in'):
        register_space('large', own)
    SPACES.pop('own')


@pytest.mark.parametrize('bad, says', [
    (lambda s: s.flops(torch.full((21,), 13)), '0 to 12; given: 13 to 13'),
    (lambda s: s.flops(torch.zeros(3, 20, dtype=torch.long)), r'\(n, 21\); given: \(3, 20\)'),
    (lambda s: s.params(torch.rand(21)), 'torch.float32'),
    (lambda s: s.decode(torch.tensor(3)), 'have shape'),
    (lambda s: s.encode(['ID']*20), r'given: \(20,\)'),
    (lambda s: s.encode('z'*21), "Unknown letter in path"),
    (lambda s: s.drop(21, 0), 'layers 0 to 20'),
    (lambda s: [s.drop(0, op) for op in range(13)], 'last op alive in layer 0'),
    (lambda s: SearchSpace.from_json('[1]'), 'JSON object'),
    (lambda s: SearchSpace.from_json('{"name": "x", "ops": ["ID"]}'), 'lacks rows'),
    (lambda s: get_space('mbsee'), "Did you mean 'mbse'"),
    (lambda s: get_space('mbse', width=-1), 'width is -1; it must be at least 0.01'),
    (lambda s: get_space('mbse', n_classes=True), 'n_classes is True; it must be an int'),
    (lambda s: get_space(['mbse']), 'Unknown space'),
    (lambda s: s.encode(s.sample(2)), 'encode takes op names'),
    (lambda s: s.drop(0, 'ID'), "op 'ID'"),
    (lambda s: s.sample(-1), 'n is -1'),
    (lambda s: s.rows(s.sample(2)), 'One path is asked for'),
    (lambda s: register_space('own', 'mbse'), 'A SearchSpace is asked for'),
    (lambda s: SearchSpace('x', 'ID', [('choice', 8, 1, 1)]), 'ops is .ID.; it must be a list'),
    (lambda s: SearchSpace('x', ['ID'], [3]), 'must have 4 entries'),
    (lambda s: SearchSpace('x', ['MaxPool_K3'], [('choice', 8, 1, 1)]), 'cannot change 3 channels into 8'),
    (lambda s: SearchSpace('x', ['MB3_K4'], [('choice', 8, 1, 1)]), 'Unknown op'),
    (lambda s: SearchSpace.from_spec({**s.spec, 'dropped': [[0, .5]]}), 'layer 0, op 0.5')])
def test_bad_input_is_answered_with_a_sentence(bad, says):
    "What the caller can mend is an InputError that says how."
    with pytest.raises(InputError, match=says):
        bad(get_space('mbse'))


def test_hostile_names_are_shown_as_text():
    "A name is never HTML, in tables and figures alike."
    from greedynasv2.spaces import KINDS, conv_cost, register_op
    from greedynasv2.viz import plot_path, plot_space
    evil = '<img src=x onerror=alert(1)>'
    pattern = evil.replace('(', r'\(').replace(')', r'\)')
    register_op(pattern, cost=lambda op, layer: conv_cost(layer.c_in, layer.c_out, 1, layer.out_size))
    space = SearchSpace(evil, ['ID', evil], [('choice', 8, 2, 2)], image_size=8, n_classes=2)
    figures = plot_path(space.rows([1, 1])), plot_space(space.costs())
    for text in (space._repr_html_(), *(fig.to_json() for fig in figures)):
        assert '<img' not in text
    KINDS.popitem()
