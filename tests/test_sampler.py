"Samplers are fair, bounded, never give what was dropped, and resume to the bit."

import pytest
import torch
from safetensors.torch import load, save

from greedynasv2.core import InputError, Scores
from greedynasv2.sampler import FairSampler, FilteredSampler, GreedySampler, Sampler, UniformSampler
from greedynasv2.spaces import get_space
from greedynasv2.vpu import Filter, PathFilter

KINDS = 'uniform', 'fair', 'greedy', 'filtered'


def by_flops(space):
    "An evaluator: the cheaper, the better."
    return lambda paths: Scores(loss=space.flops(paths)/1e6, acc=torch.zeros(len(paths)))


def stub_filter(space, is_weak):
    "A filter that calls weak what `is_weak` says, and thinks the worse of a path the more it costs."
    class Stub(Filter):
        rounds = 1
        def weakness(self, paths): return space.flops(paths).float()
        def is_weak(self, paths):
            self.seen.append(len(paths))
            return is_weak(paths)
    filt = Stub()
    filt.space = space
    filt.seen = []
    return filt


def make(kind, space, seed=0):
    "A sampler of one kind, with an evaluator or a filter that depends on FLOPs."
    if kind == 'uniform':
        return UniformSampler(space, seed)
    if kind == 'fair':
        return FairSampler(space, seed)
    if kind == 'greedy':
        return GreedySampler(space, by_flops(space), seed, pool_size=30)
    return FilteredSampler(space, stub_filter(space, lambda p: space.flops(p) > 450_000), seed)


def uses(paths, layer, op): return bool((paths[:, layer] == op).any())


@pytest.mark.parametrize('kind', KINDS)
def test_resumes_to_the_bit(kind):
    "In the middle of a buffer, through a file, into a sampler of another seed: the same paths and the same counts."
    space = get_space('toy')
    ours, theirs = make(kind, space), make(kind, space, seed=5)
    ours.progress = .7
    ours.sample(33)
    if kind == 'greedy':
        ours.steadiness()
    theirs.load_state_dict(load(save(ours.state_dict())))
    assert all(torch.equal(ours.sample(n), theirs.sample(n)) for n in (1, 7, 1, 50, 300))
    assert ours.take_stats() == theirs.take_stats() and ours.progress == theirs.progress
    if kind == 'greedy':
        assert torch.equal(ours.pool, theirs.pool) and torch.equal(ours.pool_loss, theirs.pool_loss)
        assert ours.steadiness() == theirs.steadiness()


@pytest.mark.parametrize('kind', KINDS)
def test_a_saved_state_stays_as_it_was(kind):
    "A state is a copy: what the sampler does afterwards does not change it, and loading does not tie the two."
    sampler = make(kind, get_space('toy'))
    sampler.sample(7)
    state = sampler.state_dict()
    before = {k: v.clone() for k, v in state.items()}
    first = sampler.sample(50)
    sampler.load_state_dict(state)
    again = sampler.sample(50)
    assert torch.equal(first, again) and all(torch.equal(state[k], before[k]) for k in state)


@pytest.mark.parametrize('kind', KINDS)
def test_seeds(kind):
    "The seed decides; the global generator is neither used nor moved."
    space = get_space('toy')
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one, same, other = (make(kind, space, seed).sample(60) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('refresh', [True, False])
def test_never_a_dropped_op(kind, refresh):
    "Not from the buffer, not from the pool, not from a new draw; not even when nobody called `refresh`."
    space = get_space('toy')
    sampler = make(kind, space)
    sampler.progress = 1.
    assert uses(sampler.sample(203), 0, 1)
    space.drop(0, 1)
    space.drop(2, 0)
    if refresh:
        sampler.refresh()
    paths = sampler.sample(500)
    assert not uses(paths, 0, 1) and not uses(paths, 2, 0)


@pytest.mark.parametrize('kind', KINDS)
def test_any_number_in_pieces(kind):
    "Asking one by one gives what asking at once gives; nothing asked, nothing given."
    space = get_space('toy')
    one, other = make(kind, space), make(kind, space)
    assert one.sample(0).shape == (0, 4)
    pieces = torch.cat([one.sample(n) for n in (1, 2, 3, 1, 9)])
    if kind in ('fair', 'greedy'):
        assert torch.equal(pieces, other.sample(16))      # they draw in groups of their own
    assert pieces.shape == other.sample(16).shape == (16, 4) and pieces.dtype == torch.long


def test_states_are_not_mixed_up():
    "The state of another kind, of another space, or a broken one is refused, and nothing has changed."
    space = get_space('toy')
    sampler, twin = FairSampler(space), FairSampler(space)
    sampler.sample(1), twin.sample(1)
    bad = {**sampler.state_dict(), 'generator': torch.zeros(3, dtype=torch.uint8)}
    for state in (make('greedy', space).state_dict(), FairSampler(get_space('mbse')).state_dict(), bad):
        with pytest.raises(InputError):
            sampler.load_state_dict(state)
    assert torch.equal(sampler.sample(50), twin.sample(50))


def test_stats_start_anew():
    "Counts are given once; nothing drawn means no rate."
    sampler = UniformSampler(get_space('toy'))
    sampler.sample(5)
    assert sampler.take_stats() == dict(drawn=5, kept=5, rate=1., fallbacks=0)
    assert sampler.take_stats() == dict(drawn=0, kept=0, rate=None, fallbacks=0)


def test_a_kind_of_ones_own():
    "It says how it draws; the rest is there."
    class Cheapest(Sampler):
        def refill(self, n): return torch.zeros(3, self.space.n_layers, dtype=torch.long)
    sampler = Cheapest(get_space('toy'))
    assert not sampler.sample(4).any() and len(sampler.buffer) == 2


def test_uniform_is_uniform():
    "Every alive op of a layer comes equally often."
    space = get_space('toy')
    space.drop(1, 3)
    counts = UniformSampler(space).sample(12_000)[:, 1].bincount(minlength=4)
    assert counts[3] == 0 and (counts[:3] - 4000).abs().max() < 250


@pytest.mark.parametrize('dropped', [[], [(0, 1)], [(0, 1), (0, 2), (3, 0)], [(layer, 2) for layer in range(4)]])
def test_one_step_is_fair(dropped):
    "Of the alive ops of a layer none is used more than once more than another, and every one is used."
    space = get_space('toy')
    for pair in dropped:
        space.drop(*pair)
    sampler = FairSampler(space)
    assert sampler.paths_per_step == space.alive.sum(1).max()
    for _ in range(20):
        paths = sampler.sample(sampler.paths_per_step)
        assert not len(sampler.buffer)                                   # a step is one whole group
        for layer, alive in enumerate(space.alive):
            counts = paths[:, layer].bincount(minlength=4)
            assert not counts[~alive].any() and counts[alive].min() >= 1
            assert counts[alive].max() - counts[alive].min() <= 1


def test_extra_turns_go_round():
    "Over many steps the ops that come once more are not always the same."
    space = get_space('toy')
    space.drop(0, 0)
    counts = FairSampler(space).sample(4*300)[:, 0].bincount(minlength=4)
    assert (counts[1:] - 400).abs().max() < 60


def test_greedy_gives_the_best_k_of_m():
    "In order, one a step, and counts what it drew."
    space = get_space('toy')
    scored = []
    def evaluate(paths):
        scored.append(paths)
        return by_flops(space)(paths)
    sampler = GreedySampler(space, evaluate, m=8, k=3)
    got = torch.cat([sampler.sample(1) for _ in range(3)])
    assert len(scored) == 1
    assert space.flops(got).tolist() == space.flops(scored[0]).sort().values[:3].tolist()
    assert sampler.take_stats() == dict(drawn=8, kept=3, rate=3/8, fallbacks=0)


def test_pool_keeps_the_best_once_within_the_limit():
    "Best first, at most so many, no path twice, nothing above the FLOPs limit of the search, nothing that has no loss."
    space = get_space('toy')
    sampler = GreedySampler(space, lambda p: Scores(-space.flops(p)/1e6, None), pool_size=12)
    sampler.sample(1500)                          # 3000 draws from 256 paths: the best is among them
    assert len(sampler.pool) == 12 and len(sampler.pool.unique(dim=0)) == 12
    assert (space.flops(sampler.pool) <= space.max_flops).all()
    every = torch.cartesian_prod(*[torch.arange(4)]*4)
    fitting = space.flops(every)[space.flops(every) <= space.max_flops]
    assert sampler.pool_loss[0] == -fitting.max()/1e6 and (sampler.pool_loss.diff() >= 0).all()
    sampler.remember(space.encode(['0000', '0001']), torch.tensor([torch.inf, torch.nan]))
    assert len(sampler.pool) == 12 and sampler.pool_loss.isfinite().all()


def test_newest_score_wins():
    "A path that is scored again moves to its new place."
    space = get_space('toy')
    sampler, paths = GreedySampler(space, by_flops(space)), space.encode(['0000', '0001', '0010'])
    sampler.remember(paths, torch.tensor([1., 2., 3.]))
    sampler.remember(paths[:1], torch.tensor([2.5]))
    assert space.decode(sampler.pool, compact=True) == ['0001', '0000', '0010']
    assert sampler.pool_loss.tolist() == [2., 2.5, 3.]


def test_progress_moves_draws_into_the_pool():
    "Never at the start, four of five at the end; with an empty pool, uniform."
    space = get_space('mbse')
    sampler = GreedySampler(space, by_flops(space), m=1000, k=1, pool_size=1)
    def in_pool(): return (sampler._explore() == sampler.pool[0]).all(1).float().mean().item()
    sampler.progress = 1.
    assert len(sampler._explore()) == 1000 and not len(sampler.pool)
    sampler.remember(space.encode(['0'*21]), torch.zeros(1))
    assert abs(in_pool() - .8) < .05
    sampler.progress = 0.
    assert in_pool() == 0


def test_steadiness():
    "0 at first, then the share of old acquaintances."
    space = get_space('toy')
    sampler = GreedySampler(space, by_flops(space), pool_size=4)
    assert sampler.steadiness() == 0
    sampler.remember(space.encode(['0000', '0001', '0010', '0100']), torch.arange(4.))
    assert sampler.steadiness() == 0
    assert sampler.steadiness() == 1
    sampler.remember(space.encode(['1000']), torch.tensor([-1.]))
    assert sampler.steadiness() == .75


def test_a_loss_that_is_no_number_is_the_worst():
    "Such a path is trained only if there is nothing better, and is no candidate."
    space = get_space('toy')
    sampler = GreedySampler(space, lambda p: Scores(torch.tensor([torch.nan] + [1.]*9), None))
    best = sampler.sample(5)
    assert len(best) == 5 and len(sampler.pool) <= 9
    broken = GreedySampler(space, lambda p: Scores(torch.full((10,), torch.nan), None))
    assert broken.sample(5).shape == (5, 4) and not len(broken.pool)


def test_filtered_gives_what_the_filter_keeps():
    "All of it is kept by the filter, and the counts are those of the draws."
    space = get_space('toy')
    sampler = make('filtered', space)
    paths = torch.cat([sampler.sample(1) for _ in range(200)])
    assert (space.flops(paths) <= 450_000).all()
    stats = sampler.take_stats()
    assert stats['drawn'] == sum(sampler.filt.seen) and stats['kept'] == 200 + len(sampler.buffer)
    assert stats['rate'] == stats['kept'] / stats['drawn'] and not stats['fallbacks']
    every = torch.cartesian_prod(*[torch.arange(4)]*4)
    expected = (space.flops(every) <= 450_000).unique(return_counts=True)[1][1] / 256
    assert abs(stats['rate'] - expected) < .1


def test_draws_are_bounded():
    "A filter that calls everything weak: so many draws and no more, then the least weak, in few calls."
    space = get_space('mbse')
    filt = stub_filter(space, lambda p: torch.ones(len(p), dtype=torch.bool))
    sampler = FilteredSampler(space, filt, batch_size=500, max_draws=5000)
    paths = sampler.sample(10)
    assert sum(filt.seen) == 5000 and len(filt.seen) <= 11 and max(filt.seen) <= 500
    assert sampler.take_stats() == dict(drawn=5000, kept=0, rate=0., fallbacks=1)
    flops = space.flops(UniformSampler(space).sample(5000)).sort().values
    assert space.flops(paths).max() < flops[100]                # ten of five thousand: the very cheapest
    sampler.sample(10)
    assert sum(filt.seen) == 5000                               # the next steps live on what was found


def test_fallback_fills_any_request():
    "More than the space has paths, or than may be drawn: one search, the request filled."
    space = get_space('toy')
    filt = stub_filter(space, lambda p: space.flops(p) > 94_848)                # all but one path are weak
    sampler = FilteredSampler(space, filt, max_draws=300)
    assert sampler.sample(1000).shape == (1000, 4)
    assert sum(filt.seen) == 1000 and sampler.take_stats()['fallbacks'] == 1


@pytest.mark.parametrize('rounds, reason', [(0, ''), (1, 'it keeps almost nothing')])
def test_a_filter_that_is_untrained_or_rejected_is_not_used(rounds, reason):
    "Untrained or degenerate: uniform, and the counts say so."
    space = get_space('toy')
    filt = stub_filter(space, lambda p: torch.ones(len(p), dtype=torch.bool))
    filt.rounds, filt.reason = rounds, reason
    sampler = FilteredSampler(space, filt)
    assert torch.equal(sampler.sample(20), UniformSampler(space).sample(20))
    assert not filt.seen and sampler.take_stats() == dict(drawn=20, kept=20, rate=1., fallbacks=0)


def test_refresh_forgets_the_old_filter():
    "After a new filter nothing is given that only the old one would have kept."
    space = get_space('toy')
    sampler = make('filtered', space)
    sampler.sample(1)
    assert len(sampler.buffer)
    sampler.filt = stub_filter(space, lambda p: space.flops(p) <= 450_000)
    sampler.refresh()
    assert (space.flops(sampler.sample(100)) > 450_000).all()


def test_batches_follow_the_rate():
    "A generous filter is asked about few paths, a strict one about large batches."
    space = get_space('mbse')
    for is_weak, low, high in [(lambda p: p[:, 0] > 8, 64, 160), (lambda p: p[:, :2].sum(1) > 1, 900, 1000)]:
        filt = stub_filter(space, is_weak)
        sampler = FilteredSampler(space, filt)
        for _ in range(300):
            sampler.sample(1)
        assert low <= filt.seen[-1] <= high


def test_a_real_filter():
    "With a PathFilter, its weights saved with the sampler's state: the same paths again."
    space = get_space('toy')
    torch.manual_seed(0)
    filt = PathFilter(space, dim=8)
    filt.rounds = 1
    filt.normalise(space.sample(200))
    filt.log_phi_max.copy_(filt.log_phi(space.sample(200)).median() + .7)          # about half is weak
    sampler, other = FilteredSampler(space, filt), FilteredSampler(space, filt, seed=1)
    assert not filt.is_weak(sampler.sample(40)).any()
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(sampler.sample(200), other.sample(200))


@pytest.mark.parametrize('make_it, says', [
    (lambda s: GreedySampler(s, None, m=3), 'k is 5; it must be at most m = 3'),
    (lambda s: GreedySampler(s, None, pool_size=0), 'pool_size is 0; it must be at least 1'),
    (lambda s: GreedySampler(s, None, max_pool_share=2.), 'from 0 to 1'),
    (lambda s: FilteredSampler(s, PathFilter(get_space('toy'), 4)), 'must share the space'),
    (lambda s: FilteredSampler(s, PathFilter(s, 4), max_draws=0), 'max_draws is 0'),
    (lambda s: UniformSampler(s, seed=-1), 'seed is -1'),
    (lambda s: UniformSampler(s).sample(1.5), 'n is 1.5; it must be an int')])
def test_bad_input(make_it, says):
    "The sentence says what was given and what is allowed."
    with pytest.raises(InputError, match=says):
        make_it(get_space('toy'))
