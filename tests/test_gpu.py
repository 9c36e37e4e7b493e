"""What would happen on a GPU, on a stand-in for one: all runs on the right device, and the host hardly ever waits.

`python tests/test_gpu.py` prints how often it does, `python tests/test_gpu.py places` also in which lines."""
import math
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import simgpu

simgpu.need_known_torch()

from greedynasv2.core import InputError, Scores, get_device, seeded
from greedynasv2.detection import detection_config, train_detector
from greedynasv2.nsga2 import SearchConfig, search_run
from greedynasv2.retraining import export_network, retrain, retrain_config
from greedynasv2.runs import same_events
from greedynasv2.spaces import get_space
from greedynasv2.supernet import SuperNet, SupernetEvaluator, load_network
from greedynasv2.training import make_config, train_supernet
from greedynasv2.vpu import FilterConfig, PathFilter, cross_validate, train_filter

TOY = dict(space='toy', device='cuda', epochs=4, warmup_epochs=1, round_every=1, image_size=16, n_train=32,
           batch_size=16, lr=.03, m=100, n_valid=32, memory=2, q_start=.7, q_end=.8, q_epochs=2, q_label=.6,
           filter_dim=8, merge_threshold=.3,
           log_every=2, stop_rule='none')
QUICK = dict(lr=.04, n_iters=45, folds=0, batch_u=128)      # of filter training: learns the scores of `legible`
REJECTED = 'planted by the test'

# The most waits of the host a call. Filter training has to know some things before it can go on, whatever the number of
# its steps: how the folds went, how the training went, the largest Phi, what is kept. The second wait of a classified
# batch finds an idle device. A step of retraining is to become one without a wait.
LIMITS = {'training step': 0, 'retraining step': 1, 'evaluation call': 1, 'filter training': 5, 'classified batch': 2}


def library():
    "Modules of the library that are loaded."
    return [m for name, m in sys.modules.items() if name.startswith('greedynasv2.')]


def owners(name):
    "Classes of the library that define the method `name`, wherever they are."
    values = [value for module in library() for value in vars(module).values()]
    classes = {c for c in values if isinstance(c, type) and c.__module__.startswith('greedynasv2.')}
    found = [c for c in classes if name in vars(c)]
    assert found, f'no class of the library has a method {name} any more'
    return found


def holders(function):
    "Modules of the library that call `function` by its name, and that name."
    return [(m, name) for m in library() for name, value in vars(m).items() if value is function]


def watch(device, step='training step'):
    "Count waits by what a run is doing."
    for cls in owners('train_step'):
        device.watch(cls, 'train_step', step)
    for cls in owners('log_steps'):
        device.watch(cls, 'log_steps', 'logging')
    for cls in owners('save'):
        if 'train' in vars(cls):
            device.watch(cls, 'save', 'checkpoint')
    for cls in owners('train_round'):
        device.watch(cls, 'train_round', 'round, the rest of it')
    device.watch(SupernetEvaluator, '__call__', 'evaluation call')
    for module, name in holders(train_filter):
        device.watch(module, name, 'filter training')
    device.watch(PathFilter, 'is_weak', 'classified batch', unless=['filter training'])
    device.watch(torch.optim.Adam, 'step', 'iteration of filter training')


def legible(monkeypatch, reject=()):
    "Give paths scores that a filter learns in a second; in the rounds `reject` it is rejected. The reasons, by round."
    evaluate, train, rounds = SupernetEvaluator.__call__, train_filter, []

    def scores(self, paths):
        acc = evaluate(self, paths).acc
        noise = torch.rand(len(paths), generator=torch.Generator().manual_seed(0))
        return Scores(paths.float().mean(1) + .01 * noise, acc)

    def trained(filt, weak, unlabelled, cfg):
        history = train(filt, weak, unlabelled, cfg.replace(**QUICK))
        filt.verdict = REJECTED if len(rounds) in reject else ''
        rounds.append(filt.verdict)
        return history
    monkeypatch.setattr(SupernetEvaluator, '__call__', scores)
    for module, name in holders(train):
        monkeypatch.setattr(module, name, trained)
    return rounds


def on_gpu(cfg, run_it, step='training step'):
    "Run on the stand-in; what it returned, and the device."
    with simgpu.gpu() as device:
        watch(device, step)
        return run_it(cfg, report=None), device


def no_waits(device, phase):
    "Nothing waited in a phase, or a table of what did."
    assert device.calls[phase] > 0, f'{phase} was never seen: has the method another name now?'
    assert device.n_waits(phase) <= LIMITS[phase] * device.calls[phase], device.places(phase).to_string()


def detection_toy(folder):
    "A detection run of two steps."
    return detection_config(device='cuda', image_size=64, n_train=8, n_valid=2, batch_size=4, epochs=1, log_every=1,
                            fpn_channels=16, head_channels=16, proposals=20, rois=8, run_dir=str(folder))


REFUSED = {
    'a CPU tensor next to one of the GPU': lambda x: x + torch.ones(3),
    'a CPU bound in clamp_': lambda x: x.clamp_(max=torch.tensor(1.)),
    'targets on the CPU': lambda x: nn.functional.cross_entropy(x[None], torch.tensor([1])),
    'an index on the GPU into a CPU tensor': lambda x: torch.ones(3)[x.long()],
    'a CPU tensor that takes a sum of the GPU': lambda x: torch.ones(3).add_(x),
    'cat': lambda x: torch.cat([x, torch.ones(3)]),
    'where': lambda x: torch.where(x > 0, x, torch.ones(3)),
    'a CPU generator': lambda x: torch.rand(3, device='cuda', generator=torch.Generator()),
    'two GPUs': lambda x: x + torch.ones(3, device='cuda:1'),
    'a GPU that is not there': lambda x: x.to('cuda:2'),
}


@pytest.mark.parametrize('what', REFUSED)
def test_what_cuda_refuses_is_refused(what):
    "Mixed devices in all the ways that have been met."
    with simgpu.gpu(2), pytest.raises((RuntimeError, IndexError)):
        REFUSED[what](torch.ones(3, device='cuda'))


def test_fused_kernels_ask_for_equal_strides():
    "A gradient that lies differently in memory than its parameter."
    with simgpu.gpu():
        for layout in torch.channels_last, torch.contiguous_format:
            p = nn.Parameter(torch.rand(2, 3, 4, 4, device='cuda'))
            p.grad = torch.rand(2, 3, 4, 4, device='cuda').contiguous(memory_format=layout)
            optimizer = torch.optim.SGD([p], lr=.1, fused=True)
            if layout == torch.contiguous_format:
                optimizer.step()
            else:
                with pytest.raises(RuntimeError, match='strides'):
                    optimizer.step()


WAITING = {
    'x + 1': (0, lambda x: x + torch.tensor(1.)),
    'x.item()': (1, lambda x: x[0].item()),
    'if x.isfinite().all()': (1, lambda x: bool(x.isfinite().all())),
    'x.tolist()': (1, lambda x: x.tolist()),
    'x.cpu()': (1, lambda x: x.cpu()),
    'x.to(cpu, non_blocking)': (0, lambda x: x.to('cpu', non_blocking=True)),
    'torch.tensor(..., device)': (1, lambda x: torch.tensor([1.], device='cuda')),
    'torch.zeros(device)': (0, lambda x: torch.zeros(3, device=x.device)),
    'pinned copy': (0, lambda x: torch.ones(3).pin_memory().to('cuda', non_blocking=True)),
    'copy that is not pinned': (1, lambda x: torch.ones(3).to('cuda', non_blocking=True)),
    'x[mask]': (1, lambda x: x[x > 0]),
    'x[mask] = 0': (0, lambda x: x.__setitem__(x > 0, 0.)),
    'x[index on the CPU]': (1, lambda x: x[torch.tensor([0])]),
    'x[index]': (0, lambda x: x[x.long() - 1]),
    'nonzero': (1, lambda x: x.nonzero()),
    'unique': (1, lambda x: x.unique()),
    'synchronize': (1, lambda x: torch.cuda.synchronize()),
}


@pytest.mark.parametrize('what', WAITING)
def test_waits_are_counted(what):
    "What lets the host wait for the device, and what does not."
    expected, job = WAITING[what]
    with simgpu.gpu() as device:
        x = torch.ones(3, device='cuda')
        job(x)
        device.waits.clear()
        job(x)
    assert sum(device.waits.values()) == expected, device.places().to_string()
    assert all('test_gpu' in ours for ours in device.places().ours)


def test_seeded_leaves_gpus_as_they_were():
    "Within: equal numbers on the current GPU. Afterwards: what would have come anyway, on all."
    with simgpu.gpu(2):
        def draw(i): return torch.rand(3, device=f'cuda:{i}').tolist()
        torch.manual_seed(0)
        expected = [draw(0), draw(1)]
        torch.manual_seed(0)
        with seeded(0, 'dropout'):
            inside = draw(0)
        assert [draw(0), draw(1)] == expected
        with seeded(0, 'dropout'):
            assert draw(0) == inside
        torch.cuda.set_device(1)
        with seeded(0, 'dropout'):
            assert draw(1) == inside
    assert inside != expected[0]


def test_a_gpu_that_is_named_becomes_the_current_one(tmp_path):
    "A run on cuda:1 takes nothing of cuda:0."
    with simgpu.gpu(2) as device:
        assert get_device('auto') == torch.device('cuda') and device.current == 0
        with pytest.raises(InputError, match='2 GPUs'):
            get_device('cuda:2')
        train_supernet(make_config('demo',
                                   **{**TOY, 'method': 'spos', 'epochs': 1, 'device': 'cuda:1',
                                      'run_dir': str(tmp_path)}),
                       report=None)
        assert device.current == 1


def test_images_and_labels_are_on_one_device():
    "Otherwise the first evaluation would fail, an epoch later."
    with simgpu.gpu():
        net, x, y = SuperNet(get_space('toy')).to('cuda'), torch.rand(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)
        with pytest.raises(InputError, match='one device'):
            SupernetEvaluator(net, x.to('cuda'), y)
        with pytest.raises(InputError, match='one device'):
            SupernetEvaluator(net, x.to('cuda'), y.to('cuda'), x)
        SupernetEvaluator(net, x.to('cuda'), y.to('cuda'), x.to('cuda'))


@pytest.mark.slow
@pytest.mark.parametrize('method', ['spos', 'fairnas', 'greedynas', 'greedynasv2'])
def test_every_method_trains(tmp_path, method):
    "All end; no step waits, but for GreedyNAS, which scores paths before it trains them."
    cfg = make_config('demo', **{**TOY, 'method': method, 'epochs': 2, 'filter_iters': 6, 'run_dir': str(tmp_path)})
    run, device = on_gpu(cfg, train_supernet)
    assert run.status == 'ended' and run.events('step').loss.notna().all()
    no_waits(device, 'training step')
    phases = dict(greedynas=['evaluation call'], greedynasv2=['evaluation call', 'filter training', 'classified batch'])
    for phase in phases.get(method, []):
        no_waits(device, phase)


@pytest.mark.slow
def test_from_supernet_to_export(tmp_path, monkeypatch):
    "Rounds with merges and with a filter that is rejected, stop and resume, search, retraining, export."
    verdicts = legible(monkeypatch, reject=[1])
    cfg = make_config('demo', **TOY, run_dir=str(tmp_path/'whole'))
    run, device = on_gpu(cfg, train_supernet)
    rounds = run.events('round')
    assert rounds.verdict.tolist() == ['', REJECTED, ''] and rounds.merged.sum() > 0
    assert not run.space.alive.all()
    no_waits(device, 'training step')

    verdicts.clear()
    parts = cfg.replace(run_dir=str(tmp_path/'parts'))
    assert on_gpu(parts.replace(stop_epoch=3), train_supernet)[0].status == 'stopped'
    resumed, _ = on_gpu(parts, train_supernet)
    assert same_events(run, resumed) == []
    weights = run.net.state_dict().values(), resumed.net.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))

    found, device = on_gpu(SearchConfig(device='cuda', n_evals=12, pop_size=6, n_valid=32, n_calibration=32,
                                        n_compare=4),
                           lambda cfg, report: search_run(run, cfg, report=report))
    assert len(found.history) == 12
    no_waits(device, 'evaluation call')                       # with calibration

    cfg = retrain_config(arch=str(run.folder/'search'/'arch.json'), inherit=str(run.folder), device='cuda', epochs=1,
                         n_train=64, batch_size=16, image_size=16, log_every=2, run_dir=str(tmp_path/'retrained'))
    again, device = on_gpu(cfg, retrain, 'retraining step')
    no_waits(device, 'retraining step')
    folder = export_network(again, onnx=False, report=None)
    assert load_network(folder)(torch.rand(2, 3, 16, 16)).isfinite().all()


@pytest.mark.slow
def test_a_detector_trains(tmp_path):
    "Steps, mAP and a checkpoint; torchvision's detectors wait dozens of times a step, our lines may not wait more."
    run, device = on_gpu(detection_toy(tmp_path), train_detector, 'detection step')
    assert run.status == 'ended' and run.events('step').loss.notna().all()


def test_the_old_tighten_is_caught(monkeypatch):
    "It clamped a buffer on the device by a tensor of the CPU: every run on CUDA with q above q_label ended there."
    space = get_space('toy')
    paths = space.sample(200, torch.Generator().manual_seed(0))

    def old(self, unlabelled, share):
        self.log_phi_max.clamp_(max=self.log_phi(unlabelled).quantile(share) + math.log(2))
    with simgpu.gpu():
        filt = PathFilter(space, dim=8).to('cuda')
        filt.log_phi_max.fill_(100.)                      # all are kept
        filt.tighten(paths, .3)
        assert .2 < (~filt.is_weak(paths)).float().mean() < .4
        monkeypatch.setattr(PathFilter, 'tighten', old)
        with pytest.raises(RuntimeError, match='same device'):
            filt.tighten(paths, .3)


@pytest.mark.slow
@pytest.mark.parametrize('recipe',
                         [FilterConfig(n_iters=12),
                          FilterConfig.paper(n_iters=12, batch_size=32, batch_u=32, batch_mix=32),
                                    FilterConfig(n_iters=12, method='nnpu')])
def test_filters_train_without_waiting(recipe):
    "However many steps; losses that are not finite are noticed afterwards, and the weights are as before."
    space = get_space('toy')
    weak, unlabelled = space.sample(60), space.sample(300)
    with simgpu.gpu() as device:
        filt = PathFilter(space, dim=8).to('cuda')
        device.waits.clear()
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            history = train_filter(filt, weak, unlabelled, recipe)
        assert sum(device.waits.values()) <= LIMITS['filter training'], device.places().to_string()
        assert history.loss[1:].notna().all() and history.step.iloc[-1] <= 12
        with torch.no_grad():
            filt.mlp[2].bias.fill_(math.nan)
        before = [p.tolist() for p in filt.parameters()]
        with pytest.raises(InputError, match='became nan'):
            train_filter(filt, weak, unlabelled, recipe)
        assert repr([p.tolist() for p in filt.parameters()]) == repr(before)


@pytest.mark.slow
def test_a_fold_ends_where_the_cpu_would_stop(monkeypatch):
    "A GPU goes through all steps of a fold; what comes after its loss has risen for good does not count."
    space = get_space('toy')
    weak, unlabelled = space.sample(60), space.sample(300)
    recipe = FilterConfig(n_iters=24, lr=.15, patience=.001, folds=2)
    with simgpu.gpu():
        filt = PathFilter(space, dim=8).to('cuda')
        filt.start(recipe)
        held = cross_validate(filt, weak, unlabelled, recipe, 24)
        assert held.index[-1] < 24 and (held.loss[:-1] <= held.loss.min() + 1).all()
        held = cross_validate(filt, weak, unlabelled, recipe.replace(patience=100.), 24)
        assert held.index[-1] == 24


@pytest.mark.slow
def test_planted_faults_are_caught(tmp_path, monkeypatch):
    "A CPU tensor in the loss ends a run; an item in the step is counted, and its line is named."
    cfg = make_config('demo', **{**TOY, 'method': 'spos', 'epochs': 1})
    loss_of = nn.CrossEntropyLoss.forward
    monkeypatch.setattr(nn.CrossEntropyLoss, 'forward', lambda self, z, y: loss_of(self, z, y.cpu()))
    with pytest.raises(RuntimeError, match='same device'):
        on_gpu(cfg.replace(run_dir=str(tmp_path/'mixed')), train_supernet)

    def waits(self, z, y):
        loss = loss_of(self, z, y)
        loss.item()
        return loss
    monkeypatch.setattr(nn.CrossEntropyLoss, 'forward', waits)
    _, device = on_gpu(cfg.replace(run_dir=str(tmp_path/'waits')), train_supernet)
    places = device.places('training step')
    assert device.n_waits('training step') == device.calls['training step'] == 2
    assert places.why.tolist() == ['item'] and 'test_gpu.waits' in places.ours[0]


def measured(folder):
    "Devices on which one run of each kind has happened."
    found = {}
    def note(name, cfg, run_it, step):
        run, found[name] = on_gpu(cfg, run_it, step)
        return run
    toy = make_config('demo', **{**TOY, 'epochs': 3, 'filter_iters': 20})
    run = note('greedynasv2', toy.replace(run_dir=str(folder/'v2')), train_supernet, 'training step')
    v1 = toy.replace(method='greedynas', epochs=2, run_dir=str(folder/'v1'))
    note('greedynas', v1, train_supernet, 'training step')
    search = SearchConfig(device='cuda', n_evals=12, pop_size=6, n_valid=32, n_calibration=32, n_compare=0)
    note('search', search, lambda cfg, report: search_run(run, cfg, report=report), 'training step')
    again = retrain_config(arch=str(run.folder/'search'/'arch.json'), device='cuda', epochs=1, n_train=64,
                           batch_size=16, image_size=16,
                           log_every=2, run_dir=str(folder/'again'))
    note('retraining', again, retrain, 'retraining step')
    note('detection', detection_toy(folder/'detector'), train_detector, 'detection step')
    return found


def main():
    "Print waits a call."
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder))
    for name, device in found.items():
        print(f'\n{name}\n{device.table().to_string(index=False)}')
        if 'places' in sys.argv:
            print(device.places().to_string(index=False))


if __name__ == '__main__':
    main()
