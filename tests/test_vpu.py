"The filter learns what is there, says when nothing is, repeats itself, and knows what was dropped."
import warnings

import pytest
import torch

from greedynasv2.core import InputError
from greedynasv2.spaces import get_space
from greedynasv2.vpu import FilterConfig, PathFilter, confidence, train_filter


def additive_truth(space, n, q, seed=0, draw=0):
    "Paths of a space whose ops have additive scores: the weak share q of n random ones, and a judge of any path."
    g = torch.Generator().manual_seed(seed)
    score = torch.randn(space.n_ops, generator=g) + .7*torch.randn(space.n_layers, space.n_ops, generator=g)
    def of(paths): return score[torch.arange(space.n_layers), paths].sum(1)
    threshold = of(space.sample(20_000, g)).quantile(q)
    paths = space.sample(n, g.manual_seed(seed + 1000 + draw))
    return paths[of(paths) < threshold], lambda paths: of(paths) < threshold


@pytest.mark.parametrize('m, k, p, expected', [
    (10, 5, .6, .8338), (10, 5, .1, .0016), (10, 5, .9, .9999), (3, 0, .2, 1.)])
def test_theorem_1(m, k, p, expected):
    "The paper's numbers."
    assert round(confidence(m, k, p), 4) == expected


def test_dropped_ops_are_weak():
    "Whatever the network says, a path with a dropped op is weak with probability 1."
    space = get_space('toy')
    filt, path = PathFilter(space, dim=8), space.encode(['1203', '0203'])
    filt.log_phi_max.fill_(100.)                      # everything else is kept
    assert not filt.is_weak(path).any()
    space.drop(0, 1)
    assert filt.is_weak(path).tolist() == [True, False] and filt.prob(path)[0] == 1


def test_normalisation_looks_at_alive_paths_only():
    "The largest Phi is taken over the unlabelled paths that are still alive."
    space = get_space('toy')
    filt, paths = PathFilter(space, dim=8), space.sample(300)
    top = int(filt.log_phi(paths).argmax())
    filt.normalise(paths)
    before = filt.log_phi_max.item()
    space.drop(0, int(paths[top, 0]))
    filt.normalise(paths)
    assert filt.log_phi_max.item() < before
    assert filt.prob(paths[~filt.uses_dropped(paths)]).max() == 1


def test_training_repeats_goes_on_and_leaves_the_global_generator_alone():
    "Same seed, same filter; a second round starts from the first's weights; other random numbers do not move."
    space = get_space('toy')
    weak, _ = additive_truth(space, 200, .7)
    u, cfg = space.sample(1000), FilterConfig(n_iters=20)
    torch.manual_seed(0)
    expected = torch.rand(1)
    filters = [PathFilter(space, dim=8) for _ in range(2)]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for f in filters:
            train_filter(f, weak, u, cfg)
        assert torch.equal(torch.rand(1), expected)
        assert torch.equal(*[f.log_phi(u) for f in filters])
        first = filters[0].log_phi(u)
        train_filter(filters[0], weak, u, cfg.replace(n_iters=1, lr=1e-9))
    assert filters[0].rounds == 2 and torch.allclose(filters[0].log_phi(u), first, atol=1e-5)


@pytest.mark.slow
def test_learns_an_additive_truth_at_21_layers_and_goes_on_from_it():
    "With few labels and many ops the filter does not overfit, and a second round with a higher q builds on the first."
    space = get_space('mbse')
    filt, paths = PathFilter(space, dim=16), space.sample(4000, torch.Generator().manual_seed(2))
    for q, seed in (.5, 0), (.7, 1):
        weak, truth = additive_truth(space, 800, q, seed=0, draw=seed)
        train_filter(filt, weak, space.sample(10*len(weak), torch.Generator().manual_seed(seed)), FilterConfig(seed=1))
        called, is_weak = filt.is_weak(paths), truth(paths)
        assert not filt.verdict
        assert abs(1 - called.float().mean() - (1 - q)) < .25       # few labels leave it lenient, never blind
        assert (called == is_weak).float().mean() > .7


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
def test_labels_that_mean_nothing_are_called_so(seed):
    "Weak paths drawn at random: whatever the filter makes of them, it is rejected, with a reason."
    space, g = get_space('nasbench_macro'), torch.Generator().manual_seed(seed)
    filt = PathFilter(space, dim=16)
    with pytest.warns(UserWarning, match='should not be used'):
        train_filter(filt, space.sample(300, g), space.sample(3000, g), FilterConfig(seed=seed))
    assert filt.verdict


def test_predictions_by_table_equal_the_network():
    "The quick way to log Phi gives what nn.LSTM gives, for one path, many, and none."
    space = get_space('toy')
    filt, paths = PathFilter(space, dim=8), space.sample(600)
    expected = torch.nn.functional.logsigmoid(filt.logit(filt.embed(paths))).detach()
    assert torch.allclose(filt.log_phi(paths), expected, atol=1e-6)
    assert torch.allclose(filt.log_phi(paths[0]), expected[:1], atol=1e-6)
    assert filt.prob(paths[:0]).shape == (0,) and filt.is_weak(paths[:0]).dtype == torch.bool


def test_a_verdict_does_not_outlive_its_training():
    "Trained on by another loss, a filter carries neither the old reason for its rejection nor VPU's normalisation."
    space = get_space('toy')
    filt = PathFilter(space, dim=8)
    filt.rounds, filt.verdict = 1, 'it keeps almost nothing'
    filt.log_phi_max.fill_(-3.)
    train_filter(filt, space.sample(50), space.sample(50), FilterConfig(method='pn', n_iters=2))
    assert filt.verdict == '' and filt.log_phi_max == 0


def test_a_filter_may_find_that_it_knows_best_already(monkeypatch):
    "When no step helps on what is held out, the weights stay as they are."
    import greedynasv2.vpu as vpu
    space = get_space('toy')
    filt, weak, u = PathFilter(space, dim=8), space.sample(60), space.sample(300)
    filt.rounds, before = 1, filt.log_phi(u)
    def held(*args):
        return vpu.pd.DataFrame(dict(loss=[-.5, 1.], kept_weak=[.1, .1], kept_all=[.5, .5], n=[60, 60]),
                                index=vpu.pd.Index([0, 5], name='step'))
    monkeypatch.setattr(vpu, 'cross_validate', held)
    history = train_filter(filt, weak, u, FilterConfig(n_iters=5))
    assert torch.equal(filt.log_phi(u), before) and filt.rounds == 2 and history.var_loss.notna().sum() == 1


def test_an_untrained_filter_says_so():
    "After one step it cannot distinguish anything, and the reason for its rejection is saved with it."
    space = get_space('nasbench_macro')
    weak, _ = additive_truth(space, 600, .9)
    filt = PathFilter(space, dim=8)
    with pytest.warns(UserWarning, match='should not be used'):
        train_filter(filt, weak, space.sample(10*len(weak)), FilterConfig(n_iters=1))
    assert 'keeps almost nothing' in filt.verdict


def test_saved_and_loaded_with_verdict(tmp_path):
    "Weights, normalisation, rounds and the reason for a rejection come back."
    space = get_space('toy')
    filt, paths = PathFilter(space, dim=8), space.sample(50)
    filt.normalise(paths)
    filt.rounds, filt.verdict = 3, 'keeps <b>nothing</b>'
    filt.save(tmp_path/'f.safetensors')
    again = PathFilter.load(tmp_path/'f.safetensors', space)
    assert torch.equal(again.prob(paths), filt.prob(paths))
    assert (again.rounds, again.verdict) == (3, filt.verdict)


def test_bad_input_is_answered_with_a_sentence(tmp_path):
    "Empty sets, another space, NaN, files that are no filters."
    space = get_space('toy')
    filt, paths = PathFilter(space, dim=8), space.sample(10)
    for weak, u, says in [(paths[:0], paths, 'no weak paths'), (paths, paths[:0], 'no unlabelled paths'),
                          (get_space('mbse').sample(3), paths, r'given: \(3, 21\)')]:
        with pytest.raises(InputError, match=says):
            train_filter(filt, weak, u)
    (tmp_path/'x.safetensors').write_text('no filter')
    with pytest.raises(InputError, match='cannot be read as a filter'):
        PathFilter.load(tmp_path/'x.safetensors', space)
    with pytest.raises(InputError, match='cannot be read as a filter'):
        PathFilter.load(tmp_path/'nowhere', space)
    with pytest.raises(InputError, match='0 <= k <= m'):
        confidence(3, 4, .5)
    with pytest.raises(InputError, match='Allowed: vpu, pn, upu, nnpu'):
        FilterConfig(method='pu')


@pytest.mark.parametrize('n_threads', [1, 2, 4])
def test_gradient_of_embeddings_repeats_at_any_number_of_threads(n_threads):
    "Many paths share an op, so its gradient is a long sum: the same order at every number of threads."
    space = get_space('mbse')
    filt = PathFilter(space, dim=32)
    paths = space.sample(384, torch.Generator().manual_seed(0))
    direction = torch.randn(384, space.n_layers, 32, generator=torch.Generator().manual_seed(1))

    def gradient(threads):
        torch.set_num_threads(threads)
        filt.zero_grad()
        (filt.embed(paths) * direction).sum().backward()
        return filt.own.grad.clone()

    before = torch.get_num_threads()
    try:
        expected = gradient(1)
        assert all(torch.equal(gradient(n_threads), expected) for _ in range(10))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize('recipe', [FilterConfig(n_iters=20), FilterConfig.paper(n_iters=3, batch_size=256)])
@pytest.mark.filterwarnings('ignore')
def test_training_repeats_at_two_threads(recipe):
    "The same weights from the same seed, call after call."
    space = get_space('mbse')
    paths = space.sample(400, torch.Generator().manual_seed(0))
    weak = paths[paths.sum(1).argsort()[200:]]

    def weights():
        torch.manual_seed(0)
        filt = PathFilter(space, dim=16)
        train_filter(filt, weak, paths, recipe)
        return torch.cat([p.detach().flatten() for p in filt.parameters()])

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = weights()
        assert all(torch.equal(first, weights()) for _ in range(2))
    finally:
        torch.set_num_threads(before)
