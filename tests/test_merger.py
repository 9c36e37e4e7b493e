"Merges follow their rules one by one, and a plan is applied as a whole or not at all."
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from greedynasv2.core import InputError
from greedynasv2.merger import apply_merges, plan_merges, similarity, what_if
from greedynasv2.spaces import get_space
from greedynasv2.supernet import SuperNet, step_path
from greedynasv2.vpu import PathFilter

NAMES = 'ID', 'MB3_K3', 'MB3_K5_SE', 'MB6_K3'          # of the toy space, here also from the cheapest to the costliest


def alike(*pairs, n_layers=4, n_ops=4):
    "Similarities that are 0 but for pairs (layer, op, op, similarity)."
    sim = torch.eye(n_ops).repeat(n_layers, 1, 1)
    for layer, i, j, s in pairs:
        sim[layer, i, j] = sim[layer, j, i] = s
    return sim


def decided(plan):
    "A plan as (layer, kept, removed, decision), ops by their indices."
    return [(r.layer, NAMES.index(r.kept), NAMES.index(r.removed), r.decision) for r in plan.itertuples()]


def test_similarity_is_the_cosine():
    "Literally, pair by pair; the length of an embedding does not matter, one of zeros is similar to nothing."
    space = get_space('toy')
    filt = PathFilter(space, dim=6)
    with torch.no_grad():
        filt.common.zero_()
        filt.own[1, 2] = 3*filt.own[1, 0]
        filt.own[2, 3] = 0
    sim, E = similarity(filt), filt.embedding.detach()
    for layer in range(4):
        for i in range(4):
            for j in range(4):
                x, y = E[layer, i], E[layer, j]
                expected = (x @ y / (x.norm() * y.norm())).nan_to_num(0).item()
                assert abs(sim[layer, i, j].item() - expected) < 1e-5
    assert sim.shape == (4, 4, 4) and not sim.requires_grad and sim.abs().max() <= 1


def test_more_similar_than_the_threshold():
    "Equal is not enough, and at 1 nothing merges, however alike."
    space = get_space('toy')
    assert not len(plan_merges(alike((0, 1, 2, .5)), space, .5))
    assert len(plan_merges(alike((0, 1, 2, .5)), space, .4999)) == 1
    same = similarity(SimpleNamespace(embedding=torch.randn(4, 1, 32).repeat(1, 4, 1)))
    assert not len(plan_merges(same, space, 1.)) and len(plan_merges(same, space, .99).merges) == 12


def test_most_similar_first_and_ties_in_order():
    "Down by similarity over all layers; equals by layer, then by ops."
    sim = alike((2, 2, 3, .9), (1, 0, 1, .9), (1, 2, 3, .9), (3, 0, 1, .95))
    assert decided(plan_merges(sim, get_space('toy'))) == [
        (3, 0, 1, 'merge'), (1, 0, 1, 'merge'), (1, 2, 3, 'merge'), (2, 2, 3, 'merge')]


def test_fewer_flops_stay():
    "In that layer, whatever the index; equals: the lower index; the table can be given."
    space, sim = get_space('toy'), alike((0, 1, 3, .9), (1, 2, 3, .9))
    flops = torch.tensor([[4, 3, 2, 1], [1, 1, 1, 1], [0]*4, [0]*4])
    assert decided(plan_merges(sim, space, flops=flops)) == [(0, 3, 1, 'merge'), (1, 2, 3, 'merge')]
    own = space.tables(space.native_size)[0]
    for row in plan_merges(torch.ones(4, 4, 4), space).itertuples():
        assert own[row.layer, NAMES.index(row.kept)] <= own[row.layer, NAMES.index(row.removed)]


def test_flops_are_those_of_the_native_size():
    "The image size that is trained does not change who stays."
    small, sim = get_space('mbse', image_size=32), torch.ones(21, 13, 13)
    plan, same = (plan_merges(sim, s) for s in (small, get_space('mbse')))
    assert plan.equals(same)


def test_a_removed_op_takes_part_in_nothing_again():
    "1-3 merges into 1; 2-3 is gone with 3; 0-1 may still take 1."
    sim = alike((0, 1, 3, .95), (0, 2, 3, .94), (0, 0, 1, .9))
    assert decided(plan_merges(sim, get_space('toy'))) == [(0, 1, 3, 'merge'), (0, 0, 1, 'merge')]


def test_dropped_ops_are_not_considered():
    "A pair needs two ops that are alive."
    space = get_space('toy')
    space.drop(0, 3)
    assert not len(plan_merges(alike((0, 1, 3, .95)), space))


@pytest.mark.parametrize('veto', [(0, 'MB3_K3', 'MB6_K3'), [0, 'MB6_K3', 'MB3_K3']])
def test_vetoed_pairs_are_left_alone(veto):
    "In either order, in that layer only; both ops may still merge with others."
    sim = alike((0, 1, 3, .95), (1, 1, 3, .94), (0, 2, 3, .9))
    assert decided(plan_merges(sim, get_space('toy'), vetoes=[veto])) == [
        (0, 1, 3, 'vetoed'), (1, 1, 3, 'merge'), (0, 2, 3, 'merge')]


def test_cap():
    "The most similar so many; the rest is shown. A veto costs nothing of the cap."
    sim = alike((0, 1, 3, .95), (1, 1, 3, .9), (2, 1, 3, .85))
    space, veto = get_space('toy'), (0, 'MB3_K3', 'MB6_K3')
    assert plan_merges(sim, space, max_merges=1).decision.tolist() == ['merge', 'over the cap', 'over the cap']
    # A tenth of 16 ops
    assert plan_merges(sim, space, max_merges=0).decision.tolist() == ['merge', 'over the cap', 'over the cap']
    assert plan_merges(sim, space, vetoes=[veto], max_merges=1).decision.tolist() == ['vetoed', 'merge', 'over the cap']
    pairs = ['layer', 'kept', 'removed']
    assert plan_merges(sim, space, max_merges=2)[pairs].equals(plan_merges(sim, space)[pairs])


def test_an_op_stays_in_every_layer():
    "When everything is alike, the cheapest op of each layer is left, round after round."
    space = get_space('toy')
    for _ in range(2):
        apply_merges(plan_merges(torch.ones(4, 4, 4), space), space)
    assert space.size == 1 and space.alive[:, 0].all()


def test_a_degenerate_filter_merges_nothing():
    "What it would have merged is shown, and applying it changes nothing."
    space = get_space('toy')
    plan = plan_merges(torch.ones(4, 4, 4), space, verdict='it keeps almost nothing')
    assert set(plan.decision) == {'filter not trusted'} and not len(plan.merges)
    assert apply_merges(plan, space) == 0 and space.size == 256


def test_nan_is_not_similar():
    "A filter that is broken merges nothing; the other pairs of a layer are not disturbed."
    space = get_space('toy')
    assert not len(plan_merges(torch.full((4, 4, 4), torch.nan), space))
    sim = alike((0, 1, 3, torch.nan), (0, 0, 2, .9))
    assert decided(plan_merges(sim, space)) == [(0, 0, 2, 'merge')]


def test_planning_changes_nothing():
    "Neither a plan nor a what-if touches the space."
    space = get_space('toy')
    plan_merges(torch.ones(4, 4, 4), space)
    what_if(torch.ones(4, 4, 4), space)
    assert space == get_space('toy')


def test_the_table_escapes_names_and_shows_itself_when_empty():
    "Names are text, not HTML; an empty plan has its columns and their types."
    space = get_space('toy')
    plan = plan_merges(alike((0, 1, 3, .95)), space)
    plan['removed'] = '<script>'
    assert '&lt;script&gt;' in plan._repr_html_() and '<script>' not in plan._repr_html_()
    empty = plan_merges(alike(), space)
    assert list(empty) == ['layer', 'kept', 'removed', 'similarity', 'decision']
    assert 'nothing to merge' in empty._repr_html_()
    assert empty.similarity.dtype == float and apply_merges(empty, space) == 0


def trained_net(space):
    "A supernet of which every op was trained once, and its optimizer."
    net = SuperNet(space)
    optimizer = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    for op in range(space.n_ops):
        path = torch.full((space.n_layers,), op)
        net(torch.randn(4, 3, 16, 16), path).square().mean().backward()
        step_path(optimizer, net.path_params(path))
    return net, optimizer


def test_applying_frees_weights_and_optimizer_state():
    "What goes is what the removed ops had learned; the rest keeps its momentum and works."
    space = get_space('toy')
    net, optimizer = trained_net(space)
    gone = [*net.layers[0][3].parameters(), *net.layers[2][1].parameters()]
    before, n_states = net.n_params, len(optimizer.state)
    freed = apply_merges(plan_merges(alike((0, 1, 3, .9), (2, 0, 1, .9)), space), space, net, optimizer)
    assert freed == sum(p.numel() for p in gone) == before - net.n_params
    assert len(optimizer.state) == n_states - len(gone) and not any(p in optimizer.state for p in gone)
    held = {id(p) for g in optimizer.param_groups for p in g['params']}
    assert not held & {id(p) for p in gone} and held == {id(p) for p in net.parameters()}
    assert space.size == 3*4*3*4 and net.n_params == space.n_params
    with pytest.raises(InputError, match='was dropped'):
        net(torch.randn(1, 3, 16, 16), space.encode('3000'))


@pytest.mark.parametrize('row, says', [
    ((0, 'MB3_K3', 'MB9_K3'), "Unknown op of toy 'MB9_K3'"),
    ((9, 'ID', 'MB3_K3'), 'layer of a merge is 9; it must be from 0 to 3'),
    ((1, 'ID', 'ID'), 'with itself'),
    ((1, 'ID', 'MB3_K5_SE'), 'MB3_K5_SE is no longer a choice in layer 1'),       # dropped before
    ((0, 'ID', 'MB6_K3'), 'MB6_K3 is no longer a choice in layer 0'),             # dropped by the first row
    ((0, 'MB6_K3', 'ID'), 'MB6_K3 is no longer a choice in layer 0'),             # the last op could go that way
])
def test_all_or_nothing(row, says):
    "One bad row, and not even the good one before it is applied."
    space = get_space('toy')
    space.drop(1, 2)
    net = SuperNet(space)
    before = space.to_json(), net.n_params
    plan = pd.DataFrame([(0, 'MB3_K3', 'MB6_K3'), row], columns=['layer', 'kept', 'removed'])
    with pytest.raises(InputError, match=says):
        apply_merges(plan, space, net)
    assert (space.to_json(), net.n_params) == before


def test_only_merges_are_applied():
    "Vetoed rows and those over the cap stay; so it is for a plan that went through a file."
    space = get_space('toy')
    sim = alike((0, 1, 3, .95), (1, 1, 3, .9), (2, 1, 3, .85))
    plan = plan_merges(sim, space, vetoes=[(0, 'MB3_K3', 'MB6_K3')], max_merges=1)
    apply_merges(pd.DataFrame(plan.to_dict('records')), space)
    assert (~space.alive).nonzero().tolist() == [[1, 3]]


def test_other_space_and_other_tables_are_refused():
    "A supernet of another space object, or a table that is no plan."
    space = get_space('toy')
    plan = plan_merges(alike((0, 1, 3, .95)), space)
    with pytest.raises(InputError, match='must share the space'):
        apply_merges(plan, space, SuperNet(get_space('toy')))
    with pytest.raises(InputError, match='lacks removed'):
        apply_merges(plan.drop(columns='removed'), space)
    assert space.size == 256


@pytest.mark.parametrize('kwargs, says', [
    (dict(threshold=1.5), 'threshold is 1.5; it must be from -1 to 1'),
    (dict(max_merges=-1), 'max_merges is -1; it must be at least 0'),
    (dict(vetoes=[(7, 'ID', 'MB3_K3')]), 'layer of a veto is 7'),
    (dict(vetoes=[(0, 'ID')]), 'a layer and the names of two ops'),
    (dict(vetoes=[(0, 'ID', 'MB3_K4')]), "Unknown op of toy 'MB3_K4'")])
def test_bad_input(kwargs, says):
    "The sentence says what was given and what is allowed."
    with pytest.raises(InputError, match=says):
        plan_merges(alike(), get_space('toy'), **kwargs)


def test_what_if():
    "The lower the threshold, the more merges and the smaller the space."
    space = get_space('mbse')
    torch.manual_seed(0)
    sim = similarity(SimpleNamespace(embedding=torch.randn(21, 13, 3)))
    table = what_if(sim, space)
    assert table.merges.is_monotonic_decreasing and table.log10_size.is_monotonic_increasing
    assert table.merges.iloc[-1] == 0 and table.merges.iloc[0] > 50
    assert abs(10**(table.log10_size.iloc[-1] - 23) - space.size/1e23) < 1e-6
    assert what_if(sim, space, [.6], max_merges=3).merges.tolist() == [3]
