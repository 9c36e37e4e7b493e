"A run folder survives kills, full disks, damaged files, strange content and many readers: real files, real processes."
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from greedynasv2.core import InputError
from greedynasv2.runs import (
    Control,
    EventLog,
    Run,
    RunError,
    checkpoints,
    event_line,
    list_runs,
    load_optimizer_tensors,
    optimizer_tensors,
    pack,
    same_events,
    thin,
    unpack,
    write_control,
)
from greedynasv2.spaces import SearchSpace, get_space
from greedynasv2.supernet import SuperNet
from greedynasv2.vpu import PathFilter

PARAMETERS = dict(method='spos', epochs=2, seed=0)
posix = pytest.mark.skipif(os.name != 'posix', reason='needs file locks and signals of a POSIX system')

def create(folder, **changes):
    "A run of the toy space to write to."
    resume = changes.pop('resume', False)
    return Run.create(folder, {**PARAMETERS, **changes}, get_space('toy'), resume=resume)


def start(job, *args):
    "Run `job(pipe, *args)` in another process; gives the process and our end of the pipe."
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['greedynasv2.runs'])       # it is slow to import, once is enough
    ours, theirs = context.Pipe()
    process = context.Process(target=job, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def kill(process):
    "SIGKILL, and wait until it is gone."
    process.kill()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


# -- events

def test_torn_last_line_waits_and_is_mended(tmp_path):
    with create(tmp_path) as run:
        run.log('start')
    path = tmp_path/'events.jsonl'
    torn = event_line('step', dict(step=1))[:-10]
    with open(path, 'ab') as f:
        f.write(torn)
    reader = Run.open(tmp_path)
    assert len(reader.events()) == 1                          # it waits ...
    with create(tmp_path, resume=True) as run:
        run.log('step', step=2)
        assert run._n_lines == 3                              # ... the writer closes it, and it counts as a line
    assert reader.events('step').step.tolist() == [2]         # ... and readers pass it by
    assert path.read_bytes().count(b'\n') == 3


def test_strange_lines_are_passed_by(tmp_path):
    with create(tmp_path) as run:
        run.log('step', step=1)
    with open(tmp_path/'events.jsonl', 'ab') as f:
        f.write(b'\n[1, 2]\n"text"\n{"t": 1, "kind": "step"\n\xff\xfe\x00\n' + b'[' * 100_000 + b'\n'
                b'{"kind": "step", "step": 2, "t": 5}\n{"t": 1, "kind": "unheard_of"}\n{"t": 2, "kind": ["step"]}\n'
                b'{"t": 1, "kind": "resume", "line": "no number"}\n{"t": 3, "kind": "step", "step": "<b>3</b>"}\n')
    run = Run.open(tmp_path)
    assert run.events('step').step.tolist() == [1, 2, '<b>3</b>']       # also one that somebody wrote in another order
    assert run.events().kind.tolist() == ['step', 'step', 'resume', 'step']
    assert len(EventLog(tmp_path/'events.jsonl').read()) == 4


def test_values_become_plain_json(tmp_path):
    run = create(tmp_path)
    run.log('step', step=1, loss=float('nan'), lr=torch.tensor(.5), path=torch.tensor([1, 2]), text='a\nb\u2028')
    run.log('step', step=2, loss=float('-inf'), extra=[1, {'a': torch.tensor([float('inf')])}])
    run.log('step', step=3, loss=1.)
    frame = run.events('step')
    assert frame.loss.isna().tolist() == [True, True, False] and frame.loss.dtype == float
    assert frame.path[0] == [1, 2] and frame.text[0] == 'a\nb\u2028' and frame.extra[1] == [1, {'a': [None]}]
    for line in (tmp_path/'events.jsonl').read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f'{c} is no JSON'))
    with pytest.raises(InputError, match='is a object'):
        run.log('step', x=object())
    with pytest.raises(InputError, match="called 't'"):
        run.log('step', t=1)
    run.close()


def test_resume_drops_what_it_repeats_also_twice(tmp_path):
    def go(run, steps):
        for i in steps:
            run.log('step', step=i)
    live = EventLog(tmp_path/'events.jsonl')
    run = create(tmp_path)
    run.log('start')
    go(run, range(10))
    run.save(9, {})
    go(run, range(10, 14))
    run.close()
    assert len(live.frame('step')) == 14
    for upto in (17, 12):                                      # twice from the same checkpoint
        run = create(tmp_path, resume=True)
        assert run.resume()[0] == 9
        go(run, range(10, upto))
        run.close()
    for reader in (live, EventLog(live.path)):
        assert reader.frame('step').step.tolist() == list(range(12))
        assert reader.frame('step', at_most=5).step.tolist() == [0, 4, 8, 11]
    run = create(tmp_path, resume=True)
    run.resume()
    go(run, range(10, 12))
    run.save(11, {})
    go(run, [12])
    run.close()
    run = create(tmp_path, resume=True)
    assert run.resume()[0] == 11
    go(run, [12, 13])
    run.close()
    assert live.frame('step').step.tolist() == list(range(14))
    assert [e['step'] for e in EventLog(live.path).read() if e['kind'] == 'step'] == list(range(14))


def test_a_replaced_or_missing_file_is_begun_anew(tmp_path):
    path = tmp_path/'events.jsonl'
    log = EventLog(path)
    assert log.read() == [] and len(log.frame('step')) == 0 and log.last('step') is None
    for k in range(3):                                         # the last one is longer than the one before it
        path.unlink(missing_ok=True)
        path.write_bytes(b''.join(event_line('step', dict(step=i + k)) for i in range(5 + k)))
        time.sleep(.01)
        assert [e['step'] for e in log.read()] == log.frame('step').step.tolist() == list(range(k, 5 + 2*k))
    path.unlink()
    assert log.read() == [] and len(log.frame('step')) == 0


def write_many(pipe, folder):
    run = create(folder)
    run.log('start')
    for i in range(20_000):
        run.log('step', step=i, text='x' * (i % 300), twice=2*i)
    run.finish('end')


def test_the_last_event_is_found_from_the_end(tmp_path):
    log = EventLog(tmp_path/'events.jsonl')
    log.path.write_bytes(event_line('start', {}) + b''.join(event_line('step', dict(step=i)) for i in range(100)))
    assert log.last('start', n_bytes=500) is None and log.last('start')['kind'] == 'start'
    assert {log.last('step', n_bytes=n)['step'] for n in range(200, 300)} == {99}
    with open(log.path, 'ab') as f:
        f.write(event_line('end', {})[:-1])
    assert log.last('end', 'step')['step'] == 99               # the end is not complete yet


@posix
def test_following_a_writer_in_another_process(tmp_path):
    "Readers never see a broken row, and end with all of them."
    (writer, _), log, seen = start(write_many, tmp_path), EventLog(tmp_path/'events.jsonl'), []
    reads, until = 0, time.monotonic() + 60
    while (not seen or seen[-1]['kind'] != 'end') and time.monotonic() < until:
        new = log.read()
        reads += bool(new)
        seen += new
    writer.join(60)
    steps = [e for e in seen if e['kind'] == 'step']
    assert [e['step'] for e in steps] == list(range(20_000))
    assert all(e['twice'] == 2*e['step'] and len(e['text']) == e['step'] % 300 for e in steps)
    assert reads > 3 and seen[-1]['kind'] == 'end'
    assert log.frame('step').step.tolist() == list(range(20_000))


def test_thinning_keeps_ends_and_places():
    import numpy as np
    before = set()
    for n in (2, 99, 100, 101, 150, 5000, 100_000):
        kept = thin(np.arange(n), 100)
        assert kept[0] == 0 and kept[-1] == n - 1 and len(kept) <= 100 and (np.diff(kept) > 0).all()
    for n in range(5000, 6000, 100):                           # all points but the last stay where they are
        now = set(thin(np.arange(n), 100)[:-1].tolist())
        assert before <= now
        before = now


@pytest.mark.slow
def test_a_million_events(tmp_path, capsys):
    "Measured and printed; only what is read is asserted."
    import resource
    fields = dict(step=0, epoch=0, loss=1.2345678, lr=.01, images_per_s=312.2, path='0123456789abcdefghijk')
    step, end = event_line('step', fields).decode().split('"step": 0')
    with create(tmp_path/'run') as run:
        run.log('start')
    with open(tmp_path/'run/events.jsonl', 'a') as f:
        for i in range(1_000_000):
            f.write(f'{step if i % 10_000 < 9_999 else step.replace("step", "round")}"step": {i}{end}')
    run, said = Run.open(tmp_path/'run'), []
    thinned = dict(kind='step', at_most=2000)
    for what in (dict(kind='round'), thinned, thinned, dict(kind='step')):
        begin = time.perf_counter()
        n = len(run.events(**what))
        said.append(f'{what}: {n} rows in {time.perf_counter() - begin:.2f} s')
    begin = time.perf_counter()
    status = run.status, list_runs(tmp_path).last_step[0]
    said.append(f'status and list: {time.perf_counter() - begin:.3f} s')
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with capsys.disabled():
        print('', *said, f'peak memory of the process {peak:.0f} MB', sep='\n  ')
    assert len(run.events('round')) == 100 and 1000 < len(run.events('step', at_most=2000)) <= 2000
    assert len(run.events('step')) == 999_900 and status == ('dead', 999_998)


# -- checkpoints

def test_damaged_newest_falls_back_and_is_replaced(tmp_path):
    run = create(tmp_path)
    for i in (1, 2, 3):
        run.log('step', step=i)
        run.save(i, dict(w=torch.full((1000,), i)), dict(i=i))
    run.close()
    newest = checkpoints(tmp_path)[0][2]
    whole = {f: f.read_bytes() for f in newest.iterdir()}
    for file, content in whole.items():
        for bad in (b'', content[:len(content)//2], b'\x80\x04K\x01.', b'{"a": NaN', None):
            file.unlink()
            None if bad is None else file.write_bytes(bad)
            step, tensors, meta = Run.open(tmp_path).checkpoint()
            assert (step, tensors['w'].tolist(), meta['i']) == (2, [2]*1000, 2), (file, bad)
            file.write_bytes(content)
    assert Run.open(tmp_path).load()[0] == 3
    (newest/'meta.json').write_bytes(b'{')
    with create(tmp_path, resume=True) as run:
        assert run.resume()[0] == 2
        assert 'Checkpoint 000000003 cannot be read' in run.events('warning').message.item()
        run.log('step', step=3)
        run.save(3, dict(w=torch.full((1000,), 30)))           # the damaged one is in the way of nobody
    assert Run.open(tmp_path).checkpoint()[1]['w'][0] == 30
    assert [(s, n) for s, n, _ in checkpoints(tmp_path)] == [(3, 1), (2, 0)]
    assert run.events('step').step.tolist() == [1, 2, 3]
    for *_, path in checkpoints(tmp_path):
        (path/'tensors.safetensors').write_bytes(b'')
    with pytest.raises(RunError, match='No checkpoint of .* can be read'):
        Run.open(tmp_path).checkpoint()


def test_two_checkpoints_are_kept_and_leftovers_swept(tmp_path):
    with create(tmp_path) as run:
        assert run.load() is None and run.checkpoint() is None
        for i in range(5):
            run.save(10*i, dict(w=torch.tensor(i)))
        run.save(40, dict(w=torch.tensor(100)))                # the same step once more
    assert [s for s, *_ in checkpoints(tmp_path)] == [40, 30] and run.load()[1]['w'] == 100
    half = tmp_path/'checkpoint/.50.123'
    half.mkdir()
    (half/'meta.json').touch()
    assert Run.open(tmp_path).load()[0] == 40 and half.exists()
    create(tmp_path, resume=True).close()
    assert not half.exists()


def save_forever(pipe, folder):
    run = create(folder, resume=True)
    found = run.resume()
    step = found[0] if found else 0
    pipe.send(step)
    while True:
        step += 1
        run.log('step', step=step)
        run.save(step, {f'w{i}': torch.full((20_000,), float(step)) for i in range(8)}, dict(twice=2*step))


@posix
def test_killed_while_saving(tmp_path):
    "SIGKILL at random moments: afterwards there is a complete checkpoint, and the lock is free at once."
    rng, last = random.Random(0), 0
    for _ in range(12):
        process, pipe = start(save_forever, tmp_path)
        assert pipe.recv() == last
        assert Run.open(tmp_path).status == 'running'
        while not (there := checkpoints(tmp_path)) or there[0][0] == last:
            time.sleep(.01)      # at least one is new
        time.sleep(rng.uniform(0, .2))
        kill(process)
        run = Run.open(tmp_path)
        assert run.status == 'dead' and 'is gone' in run.status_text
        step, tensors, meta = run.load()
        assert step > last and meta['twice'] == 2*step and len(tensors) == 8
        assert all((w == step).all() and w.shape == (20_000,) for w in tensors.values())
        steps = run.events('step').step.tolist()
        assert steps == list(range(1, len(steps) + 1)) and step <= len(steps) <= step + 1
        last = step
    with create(tmp_path, resume=True) as run:
        assert run.resume()[0] == last
    assert len(list((tmp_path/'checkpoint').iterdir())) == 2


def test_layouts_shared_memory_and_optimizers(tmp_path):
    "Channels-last weights, tied tensors, SGD and Adam: what is loaded is what was saved, in the layout that is there."
    space = get_space('toy')
    for make in (lambda p: torch.optim.SGD(p, lr=.1, momentum=.9), lambda p: torch.optim.AdamW(p, lr=.1)):
        shutil.rmtree(tmp_path/'run', ignore_errors=True)
        net = SuperNet(space).to(memory_format=torch.channels_last)
        optimizer = make(net.parameters())
        def step(net, opt):
            net(torch.ones(4, 3, 16, 16), torch.tensor([1, 2, 1, 3])).square().sum().backward()
            opt.step()
            opt.zero_grad()
        step(net, optimizer)
        tensors = pack('net', net.state_dict()) | optimizer_tensors(optimizer, net)
        tied = {'tied': tensors['net.head.0.0.weight'] if 'net.head.0.0.weight' in tensors else torch.ones(2)}
        with create(tmp_path/'run') as run:
            run.save(1, tensors | tied)
        loaded = Run.open(tmp_path/'run').load()[1]
        other = SuperNet(space).to(memory_format=torch.channels_last)
        other.load_state_dict(unpack('net', loaded))
        again = make(other.parameters())
        load_optimizer_tensors(again, other, loaded)
        assert len(again.state) == len(optimizer.state) < len(list(net.parameters()))
        for (_, p), (_, q) in zip(net.named_parameters(), other.named_parameters(), strict=True):
            for k, v in optimizer.state.get(p, {}).items():
                assert torch.equal(v, again.state[q][k]) and v.stride() == again.state[q][k].stride()
        torch.manual_seed(0)
        step(net, optimizer)
        torch.manual_seed(0)
        step(other, again)
        weights = net.state_dict().values(), other.state_dict().values()
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_numbers_in_optimizer_state_and_wrong_names(tmp_path):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=.1)
    optimizer.state[net.weight] = dict(step=3, factor=.1, nothing=None)
    tensors = optimizer_tensors(optimizer, net)
    optimizer.state.clear()
    load_optimizer_tensors(optimizer, net, tensors)
    assert optimizer.state[net.weight] == dict(step=3, factor=.1) and net.bias not in optimizer.state
    with pytest.raises(InputError, match="'waight'. Did you mean 'weight'"):
        load_optimizer_tensors(optimizer, net, {'optimizer.waight.step': torch.tensor(1)})


# -- the disk

def fill_the_disk(pipe, folder, what):
    import resource
    run = create(folder)
    run.log('start')
    run.save(1, dict(w=torch.ones(1000)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        for i in range(1000):
            if what == 'log':
                run.log('step', step=i, text='x' * 100)
            else:
                run.save(i + 2, dict(w=torch.ones(1000 * i)))
    except InputError as e:
        pipe.send((i, str(e), run.load()[0]))


@posix
@pytest.mark.parametrize('what', ['log', 'save'])
def test_disk_full(tmp_path, what):
    "A limit on the size of files makes writes fail for real, in the middle of a line and in the middle of a tensor."
    process, pipe = start(fill_the_disk, tmp_path, what)
    n, said, loaded = pipe.recv()
    process.join(10)
    run = Run.open(tmp_path)
    assert 'cannot be written' in said and 'larger than is allowed' in said
    if what == 'log':
        assert (tmp_path/'events.jsonl').read_bytes()[-1:] == b'\n'
        assert run.events('step').step.tolist() == list(range(n))
    else:
        assert run.load()[0] == loaded == n + 1
        assert [p.name for *_, p in checkpoints(tmp_path)] == sorted(os.listdir(tmp_path/'checkpoint'), reverse=True)


@posix
def test_disk_really_full(tmp_path):
    "The same on a file system of 300 kB, where one may be mounted."
    disk = tmp_path/'disk'
    disk.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=300k', 'tmpfs', disk], capture_output=True)
    if mounted.returncode:
        pytest.skip('A small file system cannot be mounted here; test_disk_full covers most of it.')
    try:
        run = create(disk/'run')
        run.log('start')
        run.save(1, dict(w=torch.ones(20_000)))
        with pytest.raises(RunError, match='step 2 cannot be written.*the one before is kept: the disk is full'):
            run.save(2, dict(w=torch.ones(80_000)))
        assert os.listdir(disk/'run/checkpoint') == ['000000001']
        with pytest.raises(RunError, match='events of .* cannot be written: the disk is full'):
            for i in range(100_000):
                run.log('step', step=i)
        assert (disk/'run/events.jsonl').read_bytes()[-1:] == b'\n'
        run.beat(0)
        run.close()
        assert Run.open(disk/'run').load()[0] == 1
    finally:
        subprocess.run(['umount', disk], check=True)


def test_folders_that_cannot_be(tmp_path):
    (tmp_path/'file').write_text('mine')
    for folder in (tmp_path/'file', tmp_path/'file/run', '/proc/run' if sys.platform == 'linux' else tmp_path/'file'):
        with pytest.raises(RunError, match='cannot be made a run folder: '):
            create(folder)
    assert (tmp_path/'file').read_text() == 'mine'
    for folder in (tmp_path, tmp_path/'nowhere', tmp_path/'file'):
        with pytest.raises(InputError, match='is no run: '):
            Run.open(folder)
    for content in ('', '[]', '{}', '{"parameters": 1, "space": {}}', '\x00'):
        (tmp_path/'bad').mkdir(exist_ok=True)
        (tmp_path/'bad/config.json').write_text(content)
        with pytest.raises(InputError, match='is no run: its config.json'):
            Run.open(tmp_path/'bad')
    assert list_runs(tmp_path).status.tolist() == ['unreadable']


def test_a_folder_that_is_taken_away(tmp_path):
    run = create(tmp_path/'run')
    run.log('start')
    shutil.rmtree(tmp_path/'run')
    run.beat(0)
    with pytest.raises(RunError, match='checkpoint of step 1 cannot be written'):
        run.save(1, dict(w=torch.ones(1)))
    run.close()
    assert not (tmp_path/'run').exists()


def test_another_config_is_refused_and_nothing_overwritten(tmp_path):
    with create(tmp_path/'run') as run:
        run.log('start')
        run.save(1, dict(w=torch.ones(1)))
    def everything(): return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob('*') if p.is_file()}
    before = everything()
    with pytest.raises(InputError, match='already holds this run.*resume=True'):
        create(tmp_path/'run')
    with pytest.raises(InputError, match=r'config: epochs \(3 given, 2 there\); lr \(0.1 given, nothing there\)'):
        create(tmp_path/'run', epochs=3, lr=.1, resume=True)
    with pytest.raises(InputError, match=r'another config: space.image_size \(32 given, 16 there\)'):
        Run.create(tmp_path/'run', PARAMETERS, get_space('toy', image_size=32), resume=True)
    assert everything() == before
    (tmp_path/'run/config.json').unlink()
    with pytest.raises(InputError, match='holds events but no config.json'):
        create(tmp_path/'run')


def test_what_an_old_config_lacks_never_refuses(tmp_path):
    "It means what its version did; a known parameter of another value still refuses, and nothing is rewritten."
    with create(tmp_path/'run') as run:
        run.log('start')
        run.save(1, dict(w=torch.ones(1)))
    before = (tmp_path/'run/config.json').read_bytes()
    absent = dict(sharing='none', lr=.1, method='never taken')
    def again(**changes): return Run.create(tmp_path/'run', {**PARAMETERS, **changes}, get_space('toy'), resume=True,
                                            absent=absent)
    for given in (dict(sharing='block'), dict(sharing='none', lr=.2), {}):
        with again(**given) as run:
            assert run.resumed and run.resume().step == 1
            assert run.config == {**PARAMETERS, 'sharing': 'none', 'lr': .1}      # how it goes on
    with pytest.raises(InputError, match=r'another config: epochs \(3 given, 2 there\)\.'):
        again(epochs=3, sharing='block')
    with pytest.raises(InputError, match=r"another config: beta \(0.9 given, nothing there\)"):
        again(beta=.9)
    with pytest.raises(InputError, match='already holds this run'):
        Run.create(tmp_path/'run', PARAMETERS, get_space('toy'), absent=absent)
    assert (tmp_path/'run/config.json').read_bytes() == before
    assert 'sharing' not in Run.open(tmp_path/'run').config
    assert Run.open(tmp_path/'run', absent=absent).config['sharing'] == 'none'
    with Run.create(tmp_path/'new', {**PARAMETERS, 'sharing': 'block'}, get_space('toy'), absent=absent) as run:
        assert run.config == {**PARAMETERS, 'sharing': 'block'}                   # a new run has nothing of it


# -- one writer, status

def write_until_stopped(pipe, folder):
    run = create(folder, resume=True)
    run.resume() if run.resumed else run.log('start')
    pipe.send('ready')
    pipe.recv()
    run.finish('stop', reason='asked to')
    pipe.send('done')


@posix
def test_one_writer_and_status(tmp_path):
    process, pipe = start(write_until_stopped, tmp_path/'run')
    pipe.recv()
    run = Run.open(tmp_path/'run')
    assert run.status == 'running' and f'process {process.pid} on' in run.status_text
    with pytest.raises(RunError, match=f'is being written to by another process .process {process.pid} on'):
        create(tmp_path/'run', resume=True)
    assert run.status == 'running' and len(run.events()) == 1
    kill(process)
    assert run.status == 'dead' and f'process {process.pid} on' in run.status_text and 'is gone' in run.status_text
    process, pipe = start(write_until_stopped, tmp_path/'run')
    pipe.recv()
    assert run.status == 'running'
    pipe.send('stop')
    pipe.recv()
    assert (run.status, run.status_text) == ('stopped', 'asked to') and not (tmp_path/'run/heartbeat').exists()
    with create(tmp_path/'run', resume=True) as writer:
        writer.resume()
        assert run.status == 'running'
        writer.finish('end', results=dict(best=1, loss=float('nan')))
    assert run.status == 'ended' and run.results == dict(best=1, loss=None)
    listed = list_runs(tmp_path)[['name', 'status', 'space', 'method']]
    assert listed.values.tolist() == [['run', 'ended', 'toy', 'spos']]


def fork_and_wait(pipe, folder):
    run = create(folder)
    run.log('start')
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    pipe.send(child)
    time.sleep(60)


@posix
def test_forked_processes_do_not_keep_the_lock(tmp_path):
    "A loader of images that outlives its killed parent leaves the run free."
    process, pipe = start(fork_and_wait, tmp_path)
    child = pipe.recv()
    try:
        time.sleep(.2)                                         # until it is there and has let go
        kill(process)
        os.kill(child, 0)
        assert Run.open(tmp_path).status == 'dead'
        create(tmp_path, resume=True).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_heartbeat_of_another_machine(tmp_path):
    create(tmp_path).close()
    run = Run.open(tmp_path)
    assert run.status == 'new'
    (tmp_path/'events.jsonl').write_bytes(event_line('start', {}))
    beat = tmp_path/'heartbeat'
    beat.write_text(json.dumps(dict(pid=os.getpid(), host='another.machine')))
    assert run.status == 'running' and 'another.machine' in run.status_text
    with pytest.raises(RunError, match='on another.machine, last heartbeat 0 s ago'):
        create(tmp_path, resume=True)
    os.utime(beat, (time.time() - 100,)*2)
    assert run.status == 'dead' and 'last heartbeat 100 s ago' in run.status_text
    create(tmp_path, resume=True).close()
    for strange in ('', '[]', '{"pid": "1"}', '{"pid": -1}', '{"pid": 99999999999999999999}'):
        beat.write_text(strange)
        assert run.status in ('dead', 'running')


def test_context_manager(tmp_path):
    with pytest.raises(ZeroDivisionError):
        with create(tmp_path/'error') as run:
            run.log('start')
            raise ZeroDivisionError('division by zero')
    assert (run.status, run.status_text) == ('stopped', 'ZeroDivisionError: division by zero')
    with pytest.raises(KeyboardInterrupt):
        with create(tmp_path/'break') as run:
            run.log('start')
            raise KeyboardInterrupt
    assert (run.status, run.status_text) == ('stopped', 'interrupted')
    with create(tmp_path/'end') as run:
        run.log('start')
        run.finish('end')
    assert run.status == 'ended' and len(run.events()) == 2
    with pytest.raises(InputError, match='was opened to look at, or is closed'):
        run.save(1, {})


# -- control

def test_control(tmp_path):
    run = create(tmp_path)
    assert run.read_control() is None
    assert write_control(tmp_path, merge_threshold=.7) == Control(merge_threshold=.7)
    assert run.read_control() == Control(merge_threshold=.7)
    assert run.read_control() is None
    write_control(tmp_path, vetoes=[[1, 'ID', 'MB3_K3']])
    write_control(tmp_path, stop=True)
    assert run.read_control() == Control(stop=True, merge_threshold=.7, vetoes=[[1, 'ID', 'MB3_K3']])
    os.utime(tmp_path/'control.json')
    assert run.read_control() is None                          # touched, but the same
    for changes in (dict(stop=1), dict(merge_threshold=2), dict(vetoes=[[1, 'ID']]), dict(vetoes='x'), dict(halt=True)):
        with pytest.raises(InputError):
            write_control(tmp_path, **changes)
    assert run.read_control() is None
    run.finish('stop', reason='asked to')
    run = create(tmp_path, resume=True)
    again = run.read_control()
    assert not again.stop and again.vetoes                     # the new start overrules the old stop, and nothing else
    run.close()
    with pytest.raises(InputError, match='is no run'):
        write_control(tmp_path/'nowhere', stop=True)


def test_bad_control_is_reported_once(tmp_path):
    run, path = create(tmp_path), tmp_path/'control.json'
    bad = ['', '{"stop": tr', '[]', '{"stop": "yes"}', '{"stopp": true}', '{"merge_threshold": 1.5}',
           '{"merge_threshold": NaN}', '{"vetoes": [[0, "ID"]]}', '{"vetoes": [[true, "ID", "MB3_K3"]]}', '\x00' * 10,
           '[' * 100_000, ' ' * 1_000_001]
    for i, content in enumerate(bad, 1):
        for _ in range(3):
            path.write_text(content)
            assert run.read_control() is None
        assert len(run.events('warning')) == i, content[:50]
    path.write_text(bad[1])
    assert run.read_control() is None and len(run.events('warning')) == len(bad)
    assert all(m.startswith('control.json is ignored: ') and len(m) < 300 for m in run.events('warning').message)
    path.write_text('{"stop": true}')
    assert run.read_control().stop
    run.close()


# -- space, net, filter; comparing runs

def test_a_custom_space_travels_with_its_run(tmp_path):
    rows = [('Conv_K3', 8, 1, 1), ('choice', 8, 3, 2)]
    whole = SearchSpace('<b>mine</b>', ['ID', 'MB3_K3', 'MB6_K5_SE'], rows, n_classes=4, image_size=16)
    space = whole.copy()
    for layer, op in ((0, 2), (2, 0)):
        space.drop(layer, op)
    net, filt = SuperNet(space), PathFilter(space, dim=8)
    filt.rounds, filt.verdict = 3, 'it is new.'
    with Run.create(tmp_path, PARAMETERS, whole) as run:
        assert run.space == whole and run.net is None and run.filter is None
        run.save(1, {'space.alive': space.alive} | pack('net', net.state_dict()) | pack('filter', filt.state_dict()),
                 dict(filter=dict(dim=8, rounds=3, verdict=filt.verdict)))
    run, state = Run.open(tmp_path), torch.random.get_rng_state()
    assert run.space == space and run.net.n_params == net.n_params
    x, paths = torch.randn(2, 3, 16, 16), space.sample(20)
    torch.random.set_rng_state(state)
    assert torch.equal(run.net(x, paths[0]), net.eval()(x, paths[0]))
    assert torch.equal(run.filter.prob(paths), filt.prob(paths))
    assert (run.filter.rounds, run.filter.verdict) == (3, 'it is new.')
    assert torch.equal(torch.random.get_rng_state(), state)    # looking at a run disturbs no other
    with create(tmp_path/'wrong') as run:
        run.save(1, {'space.alive': torch.ones(1, 1, dtype=torch.bool)})
    with pytest.raises(InputError, match='space.alive in the checkpoint is torch.bool of shape'):
        assert run.space
    with create(tmp_path/'misfit') as run:
        run.save(1, pack('net', net.state_dict()))
    with pytest.raises(InputError, match='The net in the checkpoint does not fit its space'):
        assert run.net


def test_same_events(tmp_path):
    def make(name, loss=1., speed=1., n=3):
        with create(tmp_path/name) as run:
            run.log('start', pid=os.getpid() + int(speed), device='cpu')
            for i in range(n):
                run.log('step', step=i, loss=loss, images_per_s=speed, time_left=speed)
            run.finish('end', seconds=speed)
        return run
    a = make('a')
    assert same_events(a, make('b', speed=7.)) == [] == same_events(tmp_path/'a', a)
    assert same_events(a, make('c', loss=2.))[0] == 'event 1 (step): loss is 1.0 against 2.0'
    assert same_events(a, make('d', n=4))[0] == '5 events against 6'
    assert len(same_events(make('e', n=50), make('f', n=50, loss=2.))) == 21


def test_which_ops_are_left_by_events_and_by_checkpoint(tmp_path):
    "The same from either source; merges that were not applied, torn or foreign ones change nothing."
    space = get_space('toy')
    with create(tmp_path) as run:
        for r, layer, removed, decision in [(0, 0, 'MB6_K3', 'merge'), (0, 1, 'ID', 'vetoed'),
                                            (1, 3, 'MB3_K3', 'merge'), (1, 9, 'ID', 'merge'), (1, 'x', 'ID', 'merge'),
                                            (1, 2, 'foreign', 'merge')]:
            run.log('merge', round=r, layer=layer, removed=removed, kept='MB3_K5_SE', similarity=.9, decision=decision)
        space.drop(0, 3)
        assert run.space_at(0) == space and run.facts_at(0) == space and run.space_at(-1) == get_space('toy')
        space.drop(3, 1)
        run.save(1, {'space.alive': space.alive})
    assert run.space_at() == space == run.space and (run.facts_at().alive == space.alive.numpy()).all()


def test_disk_errors_are_sentences():
    from greedynasv2.runs import os_errors_as
    with pytest.raises(RunError, match='^It cannot be: the disk is full.$'):
        with os_errors_as('It cannot be'):
            raise OSError(errno.ENOSPC, 'No space left on device')
