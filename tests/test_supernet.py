"What is not on the path is not touched; what is copied out is the same; what is shared gives the same numbers."
import copy

import pytest
import torch
from torch.nn import functional as F

from greedynasv2.blocks import build, common_weights, conv_bn, start_from
from greedynasv2.core import InputError, set_seed
from greedynasv2.spaces import Cost, Layer, SearchSpace, get_space, parse_op, register_op
from greedynasv2.supernet import SuperNet, SupernetEvaluator, step_path

SMALL = [('mbse_mix_shuffle', 1.), ('res50se', .25), ('nasbench_macro', 1.)]


def supernet(name, width=1., image_size=32):
    "A supernet with some training behind it, so that batch-norm statistics are not the first ones."
    set_seed(0)
    space = get_space(name, n_classes=10, image_size=image_size, width=width)
    net = SuperNet(space)
    with torch.no_grad():
        for path in space.sample(2):
            net(torch.randn(4, 3, image_size, image_size), path)
    return net


@pytest.mark.parametrize('name, width', SMALL)
@pytest.mark.parametrize('make', [
    lambda p: torch.optim.SGD(p, lr=.05, momentum=.9, weight_decay=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-3)])
def test_twenty_steps_move_only_the_path(name, width, make):
    "Momentum and weight decay included: every other weight and buffer is bit-identical, and has no optimizer state."
    net = supernet(name, width)
    path, other = net.space.sample(2)
    optimizer = make(net.parameters())
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    F.cross_entropy(net(x, other), y).backward()
    step_path(optimizer, net.path_params(other))      # leaves momentum behind
    before = copy.deepcopy(net.state_dict())
    for _ in range(20):
        F.cross_entropy(net(x, path), y).backward()
        step_path(optimizer, net.path_params(path))
    on_path = tuple(f'layers.{layer}.{op}.' for layer, op in enumerate(path.tolist())) + ('stem.', 'head.')
    after = net.state_dict()
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    assert moved and all(k.startswith(on_path) for k in moved)
    assert {id(p) for p in optimizer.state} <= {id(p) for q in (path, other) for p in net.path_params(q)}
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize('name, width, image_size, amp', [
    *[(*s, 32, False) for s in SMALL], ('mbse_mix_shuffle', 1., 32, True),
    *[pytest.param(*s, 224, False, marks=pytest.mark.slow) for s in SMALL],
    *[pytest.param(*s, 224, True, marks=pytest.mark.slow) for s in SMALL if s[0] != 'nasbench_macro']])
def test_subnet_is_bit_identical(name, width, image_size, layout, amp):
    "In eval mode, at both sizes, in both memory layouts, with and without bfloat16."
    net = supernet(name, width, image_size).eval().to(memory_format=layout)
    x, path = torch.randn(2, 3, image_size, image_size).to(memory_format=layout), net.space.sample(1)[0]
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16, enabled=amp):
        a, b = net(x, path), net.subnet(path)(x)
    assert torch.equal(a, b) and a.isfinite().all()


def test_subnet_owns_its_weights():
    "Training the copy leaves the supernet alone."
    net = supernet('toy', image_size=16)
    path = net.space.encode('1203')
    before, sub = copy.deepcopy(net.state_dict()), net.subnet(path)
    with torch.no_grad():
        for p in sub.parameters():
            p.add_(1)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_a_step_trains_what_was_loaded():
    "Parameters that `load_state_dict(assign=True)` replaced are found again; a generator of parameters will do."
    net = supernet('toy', image_size=16)
    path = net.space.encode('1203')
    net.path_params(path)
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    optimizer, before = torch.optim.SGD(net.parameters(), lr=.1), net.head[-1].weight.clone()
    F.cross_entropy(net(torch.randn(4, 3, 16, 16), path), torch.arange(4)).backward()
    step_path(optimizer, iter(net.path_params(path)))
    assert not torch.equal(net.head[-1].weight, before)
    assert all(p.grad is None for p in net.parameters())


def test_dropping_frees_weights_and_state():
    "Fewer parameters, no optimizer state, no group entry, refused in forward; the rest trains on."
    net = supernet('toy', image_size=16)
    space, optimizer = net.space, torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)
    path = space.encode('1111')
    F.cross_entropy(net(x, path), y).backward()
    step_path(optimizer, net.path_params(path))
    gone = list(net.layers[0][1].parameters())
    assert all(p in optimizer.state for p in gone)
    n, n_all = net.n_params, len(optimizer.param_groups[0]['params'])
    space.drop(0, 1)
    assert net.free_dropped(optimizer) == sum(p.numel() for p in gone) == n - net.n_params
    assert not any(p in optimizer.state for p in gone)
    assert len(optimizer.param_groups[0]['params']) == n_all - len(gone)
    assert net.free_dropped(optimizer) == 0
    with pytest.raises(InputError, match='dropped from layer 0'):
        net(x, path)
    other = space.encode('2111')
    F.cross_entropy(net(x, other), y).backward()
    step_path(optimizer, net.path_params(other))
    assert len(optimizer.state_dict()['state']) == len(optimizer.state)


@pytest.mark.parametrize('calibrate', [False, True])
@pytest.mark.parametrize('name, width, amp', [
    ('toy', 1., False), ('toy', 1., True), *[pytest.param(*s, False, marks=pytest.mark.slow) for s in SMALL],
    pytest.param('mbse_mix_shuffle', 1., True, marks=pytest.mark.slow)])
def test_sharing_prefixes_changes_no_number(name, width, calibrate, amp):
    "The same scores to the bit, in the order given, with duplicates; and the supernet is left as it was."
    net = supernet(name, width)
    before, paths = copy.deepcopy(net.state_dict()), net.space.sample(6)
    near = paths[:4].clone()                            # converged paths share long prefixes
    near[:, -1] = (near[:, -1] + 1) % net.space.n_ops
    paths = torch.cat([paths, near, paths[:2]])[torch.randperm(12)]
    x, y = torch.randn(10, 3, 32, 32), torch.arange(10)
    kwargs = dict(calibration=torch.randn(8, 3, 32, 32) if calibrate else None, batch_size=4, amp=amp)
    fast, slow = (SupernetEvaluator(net, x, y, share=s, **kwargs)(paths) for s in (True, False))
    assert torch.equal(fast.loss, slow.loss) and torch.equal(fast.acc, slow.acc)
    single = [SupernetEvaluator(net, x, y, **kwargs)(p).loss for p in paths]
    assert torch.equal(torch.cat(single), fast.loss)
    assert net.training and all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_batch_statistics_are_those_of_training_mode():
    "Without calibration the scores are those of the network in training mode, batch by batch."
    net = supernet('toy', image_size=16)
    x, y, path = torch.randn(8, 3, 16, 16), torch.arange(8), net.space.encode('1203')
    sub = net.subnet(path).train()
    with torch.no_grad():
        expected = F.cross_entropy(torch.cat([sub(b) for b in x.split(4)]), y)
    assert torch.equal(SupernetEvaluator(net, x, y, batch_size=4)(path).loss[0], expected)


def test_bad_input_is_answered_with_a_sentence():
    "Dropped ops, wrong labels, no images, NaN."
    net = supernet('toy', image_size=16)
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)
    for images, labels, says in [(x, y + 10, '0 to 9; given: 10 to 13'), (x.byte(), y, 'normalised floats'),
                                 (x[:, :1], y, r'given: \(4, 1, 16, 16\)'), (x, y[:, None], r'labels \(n,\)'),
                                 (x, y.tolist(), 'given: Tensor and list')]:
        with pytest.raises(InputError, match=says):
            SupernetEvaluator(net, images, labels)
    with pytest.raises(InputError, match='as many labels'):
        SupernetEvaluator(net, x, y[:3])
    many_groups = torch.optim.SGD([dict(params=[p]) for p in net.parameters()], lr=1.)
    with pytest.raises(InputError, match='one group'):
        step_path(many_groups, [])
    with pytest.raises(InputError, match='and as many labels'):
        SupernetEvaluator(net, x, y, calibration=x[:0])
    scores = SupernetEvaluator(net, x * torch.nan, y)(net.space.sample(3))
    assert scores.loss.isinf().all() and scores.loss.argsort().shape == (3,)
    evaluate = SupernetEvaluator(net, x, y)
    net.space.drop(2, 1)
    with pytest.raises(InputError, match='MB3_K3 was dropped from layer 2'):
        evaluate(net.space.encode('0010'))
    assert evaluate(net.space.sample(0)).loss.shape == (0,)


def test_table_has_the_same_face(data_file):
    "The table of NAS-Bench-Macro answers as a supernet does."
    from greedynasv2.nasbench import MACRO_FILE, MACRO_URL, macro_evaluator
    data_file(MACRO_FILE, MACRO_URL)
    evaluate = macro_evaluator()
    scores = evaluate(evaluate.space.encode(['22212220', '00000000']))
    assert [round(a, 2) for a in scores.acc.tolist()] == [93.13, 45.36]
    assert torch.equal(scores.loss.argsort(), scores.acc.argsort(descending=True))


def test_a_block_with_an_align_method_is_aligned():
    "An op of one's own joins by `align`; one without it keeps torch's weights; a dropped op is passed over."
    class Own(torch.nn.Sequential):
        def align(self, common, noise):
            start_from(self[0], common.linear, noise)

    def without(op, layer):
        return conv_bn(layer.c_in, layer.c_out, 1, layer.stride)

    def own(op, layer):
        return Own(*without(op, layer))

    register_op('Joins', cost=lambda op, layer: Cost(), module=own)
    register_op('StaysOut', cost=lambda op, layer: Cost(), module=without)
    space = SearchSpace('own', ['ID', 'Joins', 'StaysOut', 'MB3_K3'], [('Conv_K3', 8, 1, 2), ('choice', 16, 2, 2)],
                        n_classes=10, image_size=16)
    space.drop(1, 3)
    net = SuperNet(space)
    joins, stays = (net.layers[0][k][0].weight for k in (1, 2))
    before = joins.clone(), stays.clone()
    net.align(noise=0)
    assert not torch.equal(joins, before[0]) and torch.equal(stays, before[1])
    assert torch.equal(joins, net.layers[0][0][0].weight)      # ID starts from the same linear map


@pytest.mark.parametrize('name, layer', [('MB1_MIX', Layer(8, 16, 1, 8)), ('MB1_K3', Layer(8, 8, 1, 8)),
                                         ('Shuffle_3', Layer(32, 24, 1, 8)), ('Shuffle_x', Layer(8, 32, 1, 8)),
                                         ('Shuffle_5', Layer(8, 32, 2, 8)), ('ResNeXt_K3_1x', Layer(8, 16, 2, 8))])
def test_blocks_of_every_shape_are_aligned(name, layer):
    "Also where channels shrink at stride 1, and where nothing is expanded; outputs stay finite."
    set_seed(0)
    op = parse_op(name)
    block = build(op, layer)
    block.align(common_weights(layer, {op.kind}), noise=.1)
    assert block(torch.randn(4, layer.c_in, 8, 8)).isfinite().all()
    assert all(p.is_leaf and p.requires_grad for p in block.parameters())
