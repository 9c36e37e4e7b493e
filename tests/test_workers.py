"Several workers train as one would, split what can be split, and survive the loss of one of them."
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import until
from greedynasv2.core import InputError
from greedynasv2.loop import StepRecord, cosine_lr
from greedynasv2.runs import Run, read_heartbeat, write_control
from greedynasv2.supernet import SupernetEvaluator, step_path
from greedynasv2.training import SupernetTrainer, make_config, train_supernet
from greedynasv2.workers import DistributedEvaluator, WorkerConfig, WorkerError, launch, on_rank0, world

HERE = Path(__file__).resolve().parent
SHORT = dict(space='toy', method='spos', epochs=5, image_size=16, n_train=160, batch_size=16, lr=.03, m=40, n_valid=60,
             filter_dim=8,
             log_every=5, device='cpu', save_every=0.)


def short(folder, **changes): return make_config('demo', **{**SHORT, 'run_dir': str(folder), **changes})


class Halves(SupernetTrainer):
    "One worker that goes through a batch in two halves and adds up their gradients, between two steps."
    between = 0, 10**9

    def train_step(self, x, y):
        if not self.between[0] <= self.step < self.between[1]:
            return super().train_step(x, y)
        paths = self.algorithm.sample()
        for half in zip(x.chunk(2), y.chunk(2), strict=True):
            for path in paths:
                (self.criterion(self.net(half[0], path), half[1]) / 2).backward()
        params = list(dict.fromkeys(p for path in paths for p in self.net.path_params(path)))
        self.optimizer.param_groups[0]['lr'] = cosine_lr(self.cfg, self.step, self.n_steps)
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        torch.nn.utils.clip_grads_with_norm_(params, self.cfg.clip, norm)
        for p in params:
            self.optimizer.state[p].setdefault('momentum_buffer', torch.zeros_like(p))
        step_path(self.optimizer, params)
        self.step += 1
        self.pending.append(StepRecord(norm, norm, paths))


def in_halves(cfg, between=(0, 10**9)):
    "What one worker comes to."
    trainer = Halves(cfg, report=None)
    trainer.between = between
    return trainer.train()


def learned(run):
    "Weights and momenta of the last checkpoint; running statistics are those of one worker and not compared."
    return {k: v for k, v in run.checkpoint()[1].items() if k.startswith(('net.', 'optimizer.')) and 'running' not in k
            and 'num_batches' not in k}


def assert_same(a, b):
    "Equal up to rounding."
    a, b = learned(a), learned(b)
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope='module')
def reference(tmp_path_factory): return in_halves(short(tmp_path_factory.mktemp('reference')/'run'))


@pytest.mark.slow
def test_two_workers_train_as_one_that_accumulates_two_halves(tmp_path, reference):
    "Weights and momenta agree, and so do the paths; the loss that is logged is that of the whole batch."
    said = []
    run = train_supernet(short(tmp_path/'run', n_procs=2), report=said.append)
    assert run.status == 'ended' and run.events('start').workers.tolist() == [2] and len(said) == 5
    assert_same(run, reference)
    assert run.events('step').paths.tolist() == reference.events('step').paths.tolist()
    again = train_supernet(short(tmp_path/'run', n_procs=2), report=said.append)
    assert again.results == run.results and 'has ended already' in said[-1]


def probe(device, out):
    "What two workers find out about themselves; the first one writes it down."
    found, sizes, all_reduce = {}, [], dist.all_reduce
    trainer = SupernetTrainer(short(Path(out)/'run', method='greedynas', warmup_epochs=0, epochs=1), report=None)
    net, paths = trainer.net, trainer.space.sample(21, torch.Generator().manual_seed(1))
    x, y = trainer.data.tensors('valid', 60)
    alone = SupernetEvaluator(net, x, y)
    spread = DistributedEvaluator('probe', alone)
    for n in (21, 1):
        some = paths[:n]
        scores = on_rank0(lambda some=some: tuple(spread(some)))
        found[f'scores of {n}'] = all(torch.equal(a, b) for a, b in zip(scores, alone(some), strict=True))
    dist.all_reduce = lambda t: (sizes.append(t.numel()), all_reduce(t))
    trainer.algorithm.begin(0)
    for images, labels in list(trainer.batches(0, 0))[:3]:
        trainer.train_step(images, labels)
    used = [sum(p.numel() for p in net.path_params(p)) + 1 for record in trainer.pending for p in record.about]
    found |= dict(reduced=list(sizes), used=used, whole=net.n_params)
    before = {k: v.clone() for k, v in net.named_parameters()}
    trainer.train_step(images * (float('nan') if world.rank == 1 else 1), labels)
    found['skipped'] = all(torch.equal(v, before[k]) for k, v in net.named_parameters())
    everyone = [None, None]
    dist.all_gather_object(everyone, (found['skipped'], {k: v.detach() for k, v in net.named_parameters()}))
    found['skipped by all'] = all(skipped for skipped, _ in everyone)
    found['equal'] = all(torch.equal(everyone[0][1][k], everyone[1][1][k]) for k in before)
    if world.is_rank0:
        (Path(out)/'found.json').write_text(json.dumps(found))


@pytest.mark.slow
def test_scores_bytes_and_nan(tmp_path, monkeypatch):
    "Split scores are the same, only the path's gradients travel, and a NaN of one worker is a skipped step for all."
    monkeypatch.setenv('PYTHONPATH', f'{HERE}{os.pathsep}{os.environ.get("PYTHONPATH", "")}')
    launch('test_workers:probe', dict(out=str(tmp_path)), WorkerConfig(n_procs=2, max_restarts=0), 'cpu')
    found = json.loads((tmp_path/'found.json').read_text())
    assert found['scores of 21'] and found['scores of 1']
    assert found['reduced'] == found['used'] and len(found['used']) == 3 and max(found['used']) < found['whole'] / 2
    assert found['skipped'] and found['skipped by all'] and found['equal']


def workers_of(folder):
    "Process ids of the workers of a run on this machine, the first worker's first."
    beat = read_heartbeat(folder)
    if not beat:
        return []
    def parent(pid): return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
    try:
        launcher, pids = parent(beat.pid), [int(p.name) for p in Path('/proc').iterdir() if p.name.isdecimal()]
        return [beat.pid, *(p for p in pids if p != beat.pid and Path(f'/proc/{p}').exists() and parent(p) == launcher)]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc').exists(), reason='finds processes by /proc')
def test_workers_are_killed_and_all_go_on(tmp_path, reference):
    "The launcher starts all again from the last checkpoint, the run folder says so, and the result is the same."
    said, victims = [], {'epoch 1/': 1, 'epoch 3/': 0}
    def kill(line):
        said.append(line)
        if line[:8] in victims:
            os.kill(workers_of(tmp_path/'run')[victims.pop(line[:8])], signal.SIGKILL)
    run = train_supernet(short(tmp_path/'run', n_procs=2, resume=False), report=kill)
    assert run.status == 'ended' and not victims
    resumed = [json.loads(line) for line in (run.folder/'events.jsonl').read_text().splitlines() if '"resume"' in line]
    assert [(r['workers'], r['restarts']) for r in resumed] == [(2, 1), (2, 2)]
    assert sum('A worker was lost' in line for line in said) == 2
    assert_same(run, reference)


@pytest.mark.slow
def test_an_interrupted_run_is_stopped_and_goes_on(tmp_path, reference, start):
    "Ctrl-C reaches the process that has started the workers: they end with it, and the run folder says why."
    process = start(short(tmp_path/'run', n_procs=2))
    until(lambda: (tmp_path/'run'/'checkpoint').exists() and Run.open(tmp_path/'run').checkpoint(), 120, 'a checkpoint')
    pids = workers_of(tmp_path/'run')
    process.send_signal(signal.SIGINT)
    assert process.wait(90) != 0
    run = Run.open(tmp_path/'run')
    assert (run.status, run.events('stop').reason.tolist()) == ('stopped', ['interrupted'])
    until(lambda: not any(Path(f'/proc/{pid}').exists() for pid in pids), 10, 'workers that end')
    assert_same(train_supernet(short(tmp_path/'run', n_procs=2), report=None), reference)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_workers(tmp_path, stop_at):
    "One worker, then two, then one: the same images and paths, as if one had accumulated in the middle."
    cfg = short(tmp_path/'run', epochs=4)
    assert stop_at(SupernetTrainer(cfg, report=None), 7).train().status == 'stopped'
    def ask(line): return 'epoch 2' in line and write_control(cfg.run_dir, stop=True)
    assert train_supernet(cfg.replace(n_procs=2), report=ask).status == 'stopped'
    run = train_supernet(cfg, report=None)
    resumed = run.events('resume')
    assert run.status == 'ended' and resumed.workers.tolist() == [2, 1]
    at, until = resumed.step
    assert at == 7 and 20 <= until < 40
    assert_same(run, in_halves(short(tmp_path/'reference', epochs=4), (at, until)))


@pytest.mark.slow
def test_rounds_of_two_workers(tmp_path):
    "The filter, merges and the comparison at the end: all workers follow, and the run logs all of it."
    def cfg(name, **changes):
        return short(tmp_path/name, method='greedynasv2', epochs=3, warmup_epochs=2, q_epochs=4, n_train=320, m=200,
                     merge_threshold=.3, **changes)
    run = train_supernet(cfg('run', n_procs=2), report=None)
    assert run.status == 'ended' and len(run.events('round')) == 1
    assert set(run.results['compared']) == {'uniform', 'trained'}
    assert (run.events('merge').decision == 'merge').sum() == int((~run.space.alive).sum()) > 0
    assert_same(run, in_halves(cfg('reference')))


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_two_nodes_on_one_machine(tmp_path, reference):
    "Two launchers, each started by papermill with the same parameters but for node_rank, train one run."
    rdzv, processes = f'127.0.0.1:{free_port()}', []
    given = {k: v for k, v in SHORT.items() if k not in ('log_every', 'save_every')}
    given |= dict(n_nodes=2, rdzv=rdzv, run_dir=tmp_path/'run', recipe='demo')
    for rank in (1, 0):
        parameters = [arg for k, v in dict(given, node_rank=rank).items() for arg in ('-p', k, str(v))]
        processes.append(subprocess.Popen(
            [Path(sys.executable).with_name('papermill'), '--no-progress-bar', HERE.parent/'nbs/train_supernet.ipynb',
             tmp_path/f'{rank}.ipynb', *parameters],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    for process in processes:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error[-3000:]
    run = Run.open(tmp_path/'run')
    assert run.status == 'ended' and run.events('start').workers.tolist() == [2]
    assert_same(run, reference)


@pytest.mark.parametrize('changes, says', [
    (dict(n_procs=-1), 'n_procs is -1'), (dict(n_nodes=0), 'n_nodes is 0'), (dict(node_rank=1), 'at most 0'),
    (dict(n_nodes=2), 'host:port'), (dict(n_nodes=2, rdzv='node0:port'), 'host:port'),
    (dict(n_nodes=2, rdzv=':29500'), 'host:port'),
    (dict(n_procs=3), 'that 3 divides'), (dict(n_procs=16), 'at least 2 images'),
    (dict(n_procs=2, space='mbs'), 'Did you mean'),
    (dict(n_procs=2, data='/nowhere'), 'nowhere')])
def test_bad_parameters_are_answered_with_a_sentence(tmp_path, changes, says):
    "Before any process is started, and without a trace in the run folder."
    with pytest.raises(InputError, match=says):
        train_supernet(short(tmp_path/'run', **changes), report=None)
    assert not (tmp_path/'run').exists()


@pytest.mark.slow
def test_what_workers_cannot_do_is_said_here(tmp_path):
    "A sentence of a worker arrives as it is, at once; what is no sentence arrives with its last lines."
    train_supernet(short(tmp_path/'run', epochs=1), report=None)
    with pytest.raises(InputError, match='holds a run of another config: lr') as e:
        train_supernet(short(tmp_path/'run', epochs=1, lr=.5, n_procs=2), report=None)
    assert not isinstance(e.value, WorkerError)
    with pytest.raises(WorkerError, match='(?s)worker . .* ended.*AttributeError.*no_such'):
        launch('greedynasv2.workers:no_such', {}, WorkerConfig(n_procs=2, max_restarts=0), 'cpu')


@pytest.mark.slow
def test_a_search_is_spread_over_workers(tmp_path):
    "Two workers find what one finds, and this process evaluates nothing again."
    from greedynasv2.nsga2 import SearchConfig, search_run
    run = train_supernet(short(tmp_path/'run', epochs=1), report=None)
    notes = []
    cfg = dict(n_evals=30, pop_size=10, n_valid=60, n_calibration=32, device='cpu')
    alone = search_run(run, SearchConfig(out=str(tmp_path/'alone'), **cfg))
    call, calls = SupernetEvaluator.__call__, []
    SupernetEvaluator.__call__ = lambda self, paths: (calls.append(len(paths)), call(self, paths))[1]
    try:
        both = search_run(run, SearchConfig(n_procs=2, **cfg), report=notes.append)
    finally:
        SupernetEvaluator.__call__ = call
    assert sum(calls) == 0 and '30 paths' in notes
    assert both.history.equals(alone.history) and torch.equal(both.best, alone.best)
