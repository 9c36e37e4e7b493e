"Filters of tables learn what is there, beat ridge where layers interact, refuse what cannot be learned, and repeat."
import numpy as np
import pytest
import torch

from greedynasv2.core import InputError
from greedynasv2.filters import cells_of, fit_tables, own_effects, stack_weights, target
from greedynasv2.spaces import SearchSpace, get_space
from greedynasv2.vpu import FILTERS, Labels, filter_of

KINDS = 'linear', 'pairwise', 'ensemble'


def labels_of(space, loss, n=2000, q=.9, noise=.3, seed=0):
    "A round of `n` paths."
    g = torch.Generator().manual_seed(seed)
    paths = space.sample(n, g)
    observed = loss(paths) + noise * torch.randn(n, generator=g, dtype=torch.double)
    rank = (observed.argsort().argsort() + 1).double() / n
    return Labels(paths, rank, torch.zeros(n, dtype=torch.bool), paths[rank > 1 - q], space.sample(3000, g), q, q)


def additive(space, seed=0):
    "A loss that is a sum of effects of ops."
    g = torch.Generator().manual_seed(seed)
    effect = torch.randn(space.n_layers, space.n_ops, generator=g, dtype=torch.double) / space.n_layers**.5
    return lambda paths: effect[torch.arange(space.n_layers), paths].sum(1)


def interacting(space, seed=0):
    "A loss of which half is interactions of layers 0 and 2, and of 1 and 3."
    g = torch.Generator().manual_seed(seed)
    tables = torch.randn(2, space.n_ops, space.n_ops, generator=g, dtype=torch.double) * .7
    tables = tables - tables.mean(1, keepdim=True) - tables.mean(2, keepdim=True) + tables.mean((1, 2), keepdim=True)
    main = additive(space, seed)
    return lambda p: main(p) + tables[0][p[:, 0], p[:, 2]] + tables[1][p[:, 1], p[:, 3]]


def correlation(a, b):
    return float(np.corrcoef(np.asarray(a), np.asarray(b))[0, 1])


@pytest.mark.parametrize('kind', KINDS)
def test_recovers_an_additive_truth_and_keeps_the_share(kind):
    "Predictions follow the true losses, and the share that is kept is 1 - q within a tenth."
    space = get_space('nasbench_macro')
    loss = additive(space)
    filt = FILTERS[kind](space)
    filt.fit(labels_of(space, loss), seed=0)
    fresh = space.sample(20_000, torch.Generator().manual_seed(1))
    assert not filt.reason and filt.rounds == 1
    assert correlation(filt.weakness(fresh), loss(fresh)) > .97
    kept = ~filt.is_weak(fresh)
    assert abs(kept.double().mean() - .1) < .015
    assert loss(fresh)[kept].mean() < loss(fresh).quantile(.1)


def test_pairs_beat_linear_where_layers_interact():
    "By far, and the ensemble is nearly as good as the better of its members."
    space = get_space('mbse')
    loss = interacting(space)
    fresh = space.sample(10_000, torch.Generator().manual_seed(1))
    found = {}
    for kind in KINDS:
        filt = FILTERS[kind](space)
        filt.fit(labels_of(space, loss, n=4000), seed=0)
        found[kind] = correlation(filt.weakness(fresh), loss(fresh))
    assert found['pairwise'] > found['linear'] + .1
    assert found['ensemble'] > found['pairwise'] - .02
    assert [0, 2] in filt.pairs.tolist() and [1, 3] in filt.pairs.tolist()


@pytest.mark.parametrize('kind', KINDS)
def test_repeats_itself_on_any_number_of_threads(kind):
    "The same labels and seed give the same bits, also after another fit; random numbers elsewhere do not move."
    space = get_space('nasbench_macro')
    labels = labels_of(space, interacting(space), n=1500)
    n_threads = torch.get_num_threads()
    states = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            filt = FILTERS[kind](space)
            if threads == 2:
                filt.fit(labels_of(space, additive(space, 5), n=300, seed=3), seed=1)
            before = torch.get_rng_state()
            filt.fit(labels, seed=7)
            assert torch.equal(before, torch.get_rng_state())
        finally:
            torch.set_num_threads(n_threads)
        states.append(filt.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@pytest.mark.parametrize('kind', KINDS)
def test_saved_and_loaded_it_is_the_same(kind, tmp_path):
    "By file, and by state and `about` as in a checkpoint; `restore` goes back."
    space = get_space('toy')
    filt = FILTERS[kind](space)
    filt.fit(labels_of(space, additive(space), n=300), seed=0)
    paths = space.sample(500)
    filt.save(tmp_path / 'filter.safetensors')
    loaded = FILTERS[kind].load(tmp_path / 'filter.safetensors', space)
    again = filter_of(space, filt.about(), filt.state_dict())
    for other in (loaded, again):
        assert torch.equal(other.prob(paths), filt.prob(paths)) and other.rounds == 1 and other.kind == kind
        assert torch.equal(other.similarity(), filt.similarity())
    was = filt.snapshot()
    expected = filt.prob(paths)
    filt.fit(labels_of(space, additive(space, 9), n=300), seed=0)
    assert not torch.equal(filt.prob(paths), expected)
    filt.restore(was)
    assert torch.equal(filt.prob(paths), expected)
    with pytest.raises(InputError, match='not the state'):
        filt.load_state_dict({'layer': filt.layer})
    with pytest.raises(InputError, match='layers and ops'):
        FILTERS[kind](get_space('mbse')).load_state_dict(filt.state_dict())


@pytest.mark.parametrize('kind', KINDS)
def test_dropped_ops_are_weak(kind):
    "Also those that earlier rounds evaluated, and the filter can be fitted after a drop."
    space = SearchSpace.from_json(get_space('toy').to_json())
    labels = labels_of(space, additive(space), n=400)
    filt = FILTERS[kind](space)
    space.drop(0, 1)
    filt.fit(labels, seed=0)
    paths = labels.paths
    with_it = paths[:, 0] == 1
    assert filt.is_weak(paths[with_it]).all() and (filt.prob(paths[with_it]) == 1).all()
    assert not filt.is_weak(paths[~with_it]).all()
    filt.tighten(paths, .05)
    alive = paths[~with_it]
    assert abs((~filt.is_weak(alive)).double().mean() - .05) < .02


@pytest.mark.parametrize('kind', KINDS)
def test_after_a_drop_the_same_share_is_kept(kind):
    "Whatever the dropped op was worth."
    space = SearchSpace.from_json(get_space('nasbench_macro').to_json())
    loss = additive(space)
    filt = FILTERS[kind](space)
    filt.fit(labels_of(space, loss, q=.8), seed=0)
    worst = int(filt.layer[0].argmax())
    unlabelled = space.sample(5000, torch.Generator().manual_seed(2))
    space.drop(0, worst)
    filt.normalise(unlabelled)
    alive = space.sample(5000, torch.Generator().manual_seed(3))
    assert abs((~filt.is_weak(alive)).double().mean() - .2) < .03


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('n', [1, 2, 19, 20, 60])
def test_few_paths_never_break_it(kind, n):
    "Fewer paths than features: a reason, or a filter; and every number finite."
    space = get_space('mbse')
    filt = FILTERS[kind](space)
    filt.fit(labels_of(space, additive(space), n=n), seed=0)
    paths = space.sample(100)
    assert filt.reason or filt.rounds
    assert bool(filt.reason) or n >= 20
    assert filt.weakness(paths).isfinite().all() and filt.prob(paths).isfinite().all()
    assert filt.similarity().isfinite().all()


@pytest.mark.parametrize('kind', KINDS)
def test_broken_ranks(kind):
    "Equal ranks are refused, ranks that are not finite count as worst, random ranks are found out."
    space = get_space('nasbench_macro')
    labels = labels_of(space, additive(space), n=600)
    filt = FILTERS[kind](space)
    filt.fit(labels._replace(rank=torch.full((600,), .5, dtype=torch.double)), seed=0)
    assert 'same rank' in filt.reason
    noise = torch.rand(600, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    filt.fit(labels._replace(rank=noise), seed=0)
    assert 'luck' in filt.reason
    rank = labels.rank.clone()
    rank[rank > .9] = torch.nan
    rank[(rank > .8) & (rank < .85)] = torch.inf
    filt.fit(labels._replace(rank=rank), seed=0)
    assert not filt.reason
    fresh = space.sample(2000)
    assert correlation(filt.weakness(fresh), additive(space)(fresh)) > .85


@pytest.mark.parametrize('kind', KINDS)
def test_twins_are_alike_and_what_has_no_data_is_not(kind):
    "Similarity: 1 with itself, high for twins in layers that matter, 0 without data, symmetric."
    space = get_space('nasbench_macro')
    loss = interacting(space)
    def twins(p): return loss(torch.where(p == 2, 1, p))
    labels = labels_of(space, twins, n=5000, noise=.1)
    some = labels.paths[:, 3] != 0
    labels = labels._replace(paths=labels.paths[some], rank=labels.rank[some], held_out=labels.held_out[some])
    filt = FILTERS[kind](space)
    filt.fit(labels, seed=0)
    alike = filt.similarity()
    assert torch.equal(alike, alike.mT) and alike.min() >= 0 and alike.max() <= 1
    assert (alike.diagonal(dim1=1, dim2=2) == 1).all()
    assert (alike[3, 0, 1:] == 0).all()
    matter = [0, 1, 2]
    assert alike[matter, 1, 2].min() > .6
    assert alike[matter, 0, 1].max() < .3


def test_prob_is_a_chance():
    "Of the paths with a probability near p to be weak, about p are."
    space = get_space('mbse')
    loss = additive(space)
    filt = FILTERS['linear'](space)
    filt.fit(labels_of(space, loss, n=4000, q=.5, noise=.5), seed=0)
    fresh = labels_of(space, loss, n=20_000, q=.5, noise=.5, seed=5)
    prob = filt.prob(fresh.paths)
    for low in (.2, .5, .8):
        near = (prob > low - .1) & (prob < low + .1)
        assert abs((fresh.rank[near] > .5).double().mean() - low) < .1


def test_own_effects_need_repeats_that_agree():
    "With exact ranks what the tables miss is the path's own; with noise alone it is not."
    space = get_space('nasbench_macro')
    g = np.random.default_rng(0)
    paths = space.sample(6000, torch.Generator().manual_seed(0)).numpy()
    own = g.standard_normal(3**8)
    of = own[paths @ 3 ** np.arange(8)]
    keys, effect = own_effects(paths, 3, of, np.zeros(6000))
    assert correlation(effect, own[keys]) > .99
    assert own_effects(paths, 3, g.standard_normal(6000), np.zeros(6000)) is None
    assert own_effects(get_space('mbse').sample(100).numpy(), 13, g.standard_normal(100), np.zeros(100)) is None


def test_weights_count_as_repeats():
    "An evaluation of weight 2 is the same as two of weight 1."
    g = np.random.default_rng(0)
    paths = g.integers(0, 3, (300, 4))
    t = g.standard_normal(300) + paths[:, 0]
    twice = fit_tables(cells_of(np.concatenate([paths, paths]), 3), np.concatenate([t, t]), np.ones(600))
    weighted = fit_tables(cells_of(paths, 3), t, np.full(300, 2.))
    assert np.allclose(twice.layer, weighted.layer)


def test_stacking_prefers_who_predicts():
    "A member that knows gets most of the weight, none is negative; nothing known: equal weights."
    g = np.random.default_rng(0)
    t = g.standard_normal(2000)
    fair = np.stack([t + .1*g.standard_normal(2000), g.standard_normal(2000), -t], 1)
    share = stack_weights(fair, t, np.ones(2000))
    assert share[0] > .8 and share[1] < .1 and share[2] == 0
    assert np.allclose(stack_weights(np.zeros((50, 2)), g.standard_normal(50), np.ones(50)), .5)


def test_targets_keep_the_order():
    "Every scale rises with the rank, and ends are finite."
    rank = np.arange(1, 101) / 100
    for kind in ('rank', 'sqrt', 'log', 'normal'):
        t = target(rank, kind)
        assert (np.diff(t) > 0).all() and np.isfinite(t).all() and abs(t.std() - 1) < 1e-9


@pytest.mark.parametrize('kind', KINDS)
def test_algorithm_1_resumes_with_it(kind):
    "Rounds with merges; gone on with from its state, the next rounds and paths are the same."
    from greedynasv2.algorithm import Algorithm1, SimulationConfig
    from greedynasv2.core import Scores
    cfg = SimulationConfig(method='greedynasv2', filter=kind, m=300, memory=3, stop_rule='none', merge_threshold=.6)

    def new():
        space = SearchSpace.from_json(get_space('nasbench_macro').to_json())
        loss = additive(space)
        return Algorithm1(cfg, space, lambda p: Scores(loss=loss(p).float(), acc=-loss(p).float()))

    def go_on(algorithm, epochs):
        paths = []
        for epoch in epochs:
            facts = algorithm.round(epoch)
            assert not facts['verdict']
            algorithm.begin(epoch)
            paths.append(torch.cat([algorithm.sample() for _ in range(20)]))
        return torch.cat(paths)

    first = new()
    go_on(first, (20, 40))
    tensors, numbers = first.state_dicts()
    tensors = {part: {k: v.clone() for k, v in state.items()} for part, state in tensors.items()}
    second = new()
    for layer, op in (~first.space.alive).nonzero().tolist():
        second.space.drop(layer, op)
    second.load_state_dicts(tensors, numbers)
    assert torch.equal(go_on(first, (60, 80)), go_on(second, (60, 80)))
    weights = first.filt.state_dict().values(), second.filt.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
