"Nobody gets in, no file of others is changed or deleted, and what is damaged is refused with a sentence."
import errno
import io
import json
import os
import random
import shutil
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from greedynasv2.core import InputError, Scores, check_finite, write_atomic
from greedynasv2.data import load_cifar10_set
from greedynasv2.nsga2 import CachedEvaluator
from greedynasv2.retraining import retrain, retrain_config
from greedynasv2.runs import Run, RunError, asked_of, checkpoints, list_runs
from greedynasv2.spaces import Arch, SearchSpace, get_space, write_arch
from greedynasv2.supernet import build_network, load_network, save_network
from greedynasv2.training import make_config, train_supernet
from greedynasv2.vpu import PathFilter, load_filter
from greedynasv2.workers import WorkerConfig, dist, first_failure, launch

HERE = Path(__file__).resolve().parent


# -- open ports

def descendants(pid):
    "Process ids of `pid` and of all that it has started."
    found = [pid]
    for parent in found:
        for task in Path(f'/proc/{parent}/task').glob('*/children'):
            found += map(int, task.read_text().split())
    return found


def listening(pids):
    "Addresses, as hexadecimal numbers, at which these processes listen for TCP connections."
    sockets = set()
    for pid in pids:
        for link in Path(f'/proc/{pid}/fd').iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue                                     # closed in between
            if target.startswith('socket:['):
                sockets.add(target[8:-1])
    found = []
    for table in 'tcp', 'tcp6':
        for line in Path(f'/proc/net/{table}').read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == '0A' and rest[5] in sockets:
                found.append(local.partition(':')[0])
    return found


def look_at_ports(device, out):
    "What a worker does while the test looks at the sockets of all of them."
    dist.barrier()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(listening(descendants(os.getppid()))))
    dist.barrier()


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/net/tcp').exists(), reason='finds sockets by /proc')
def test_workers_of_one_machine_listen_on_loopback_only(tmp_path, monkeypatch):
    "Launcher and workers: no other machine can connect to them."
    monkeypatch.setenv('PYTHONPATH', f'{HERE}{os.pathsep}{os.environ.get("PYTHONPATH", "")}')
    out = tmp_path/'listening.json'
    launch('test_safe:look_at_ports', dict(out=str(out)), WorkerConfig(n_procs=2, max_restarts=0), 'cpu')
    found = json.loads(out.read_text())
    loopback = '0100007F', '00000000000000000000000001000000', '0000000000000000FFFF00000100007F'
    assert found and set(found) <= set(loopback), found


# -- damaged files

SHORT = dict(space='toy', method='spos', epochs=4, image_size=16, n_train=64, batch_size=16, lr=.03, m=40, n_valid=60,
             filter_dim=8, log_every=2, device='cpu', save_every=0., warmup_epochs=2)


def short(folder, **changes):
    return make_config('demo', **{**SHORT, 'run_dir': str(folder), **changes})


def flipped(content, rng):
    "`content` with one bit changed."
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1:]


def rewrite(path, change):
    "Change the tensors of a checkpoint, and leave out its checksum, as versions did that wrote none."
    tensors = load_file(path/'tensors.safetensors')
    change(tensors)
    save_file(tensors, path/'tensors.safetensors')
    meta = json.loads((path/'meta.json').read_text())
    meta.pop('sha256')
    (path/'meta.json').write_text(json.dumps(meta))


def other_momentum(tensors):
    name = next(k for k in tensors if k.endswith('momentum_buffer'))
    tensors[name] = torch.zeros(3)


def whole_numbers(tensors):
    name = next(k for k in tensors if k.startswith('net.head') and k.endswith('weight'))
    tensors[name] = tensors[name].char()


def not_a_number(tensors):
    name = next(k for k in tensors if k.startswith('net.head') and k.endswith('weight'))
    tensors[name] = torch.full_like(tensors[name], torch.nan)


def one_missing(tensors):
    del tensors[next(k for k in tensors if k.startswith('net.'))]


def no_space(tensors):
    del tensors['space.alive']


DAMAGE = [other_momentum, whole_numbers, not_a_number, one_missing, no_space]


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
    "A run that was stopped after two of four epochs."
    run = train_supernet(short(tmp_path_factory.mktemp('stopped')/'run', stop_epoch=2), report=None)
    assert run.status == 'stopped' and len(checkpoints(run.folder)) == 2
    return run.folder


def test_a_flipped_bit_falls_back_to_the_older_checkpoint(tmp_path):
    "Wherever it is in the files: what is read is the newest checkpoint as it was saved, or the one before."
    with Run.create(tmp_path, dict(seed=0), get_space('toy')) as run:
        saved = {step: dict(w=torch.randn(20), n=torch.arange(step)) for step in (1, 2)}
        for step, tensors in saved.items():
            run.save(step, tensors, dict(loss=[.1, 1e-9], note='x'))
    newest = checkpoints(tmp_path)[0].path
    rng = random.Random(0)
    for file in 'meta.json', 'tensors.safetensors':
        whole = (newest/file).read_bytes()
        for _ in range(150):
            (newest/file).write_bytes(flipped(whole, rng))
            found = Run.open(tmp_path).checkpoint()
            assert found.tensors.keys() == saved[found.step].keys()
            assert all(torch.equal(v, saved[found.step][k]) for k, v in found.tensors.items())
            assert found.meta['loss'] == [.1, 1e-9] and found.meta['note'] == 'x'
        (newest/file).write_bytes(whole)
    assert Run.open(tmp_path).checkpoint().step == 2


@pytest.mark.parametrize('damage', DAMAGE)
def test_a_wrong_checkpoint_falls_back_to_the_older_one(tmp_path, stopped, damage):
    "Also one without a checksum: the run goes on from the one before, and says why."
    shutil.copytree(stopped, tmp_path/'run')
    newest, older = checkpoints(tmp_path/'run')
    rewrite(newest.path, damage)
    run = train_supernet(short(tmp_path/'run'), report=None)
    assert run.status == 'ended' and run.events('resume').step.tolist() == [older.step]
    assert f'Checkpoint {newest.path.name} cannot be used' in run.events('warning').message.item()


@pytest.mark.parametrize('damage', DAMAGE[:4])
def test_a_wrong_checkpoint_is_no_warm_up(tmp_path, stopped, damage):
    "A sentence, and not a crash of the optimizer."
    shutil.copytree(stopped, tmp_path/'run')
    for found in checkpoints(tmp_path/'run'):
        rewrite(found.path, damage)
    cfg = short(tmp_path/'next', warm_from=str(tmp_path/'run'), method='greedynas')
    with pytest.raises(InputError, match='The checkpoint of .*run cannot be used'):
        train_supernet(cfg, report=None)


def test_a_damaged_network_is_refused(tmp_path):
    "One flipped bit, whole numbers, NaN; a network without a checksum is still read."
    space = get_space('toy')
    path = space.encode('1111')
    model = build_network(space, path)
    save_network(tmp_path, model, space, path)
    file = tmp_path/'weights.safetensors'
    whole = file.read_bytes()
    rng = random.Random(0)
    for _ in range(20):
        file.write_bytes(flipped(whole, rng))
        with pytest.raises(InputError, match='does not hold the weights'):
            load_network(tmp_path)
    arch = json.loads((tmp_path/'arch.json').read_text())
    del arch['sha256']
    (tmp_path/'arch.json').write_text(json.dumps(arch))
    file.write_bytes(whole)
    load_network(tmp_path)
    name = next(k for k, v in model.state_dict().items() if v.ndim == 4)
    for bad in model.state_dict()[name].char(), torch.full_like(model.state_dict()[name], torch.inf):
        save_file({**model.state_dict(), name: bad}, file)
        with pytest.raises(InputError, match=f'does not hold the weights.*{name}'):
            load_network(tmp_path)


def test_a_damaged_filter_is_refused(tmp_path):
    "One flipped bit, whole numbers, NaN, another size; a filter without a checksum is still read."
    space = get_space('toy')
    filt = PathFilter(space, dim=4)
    file = tmp_path/'filter.safetensors'
    filt.save(file)
    paths = space.sample(9)
    assert torch.equal(load_filter(file, space).prob(paths), filt.prob(paths))
    whole = file.read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        file.write_bytes(flipped(whole, rng))
        try:
            found = load_filter(file, space)
        except InputError:
            continue
        assert torch.equal(found.prob(paths), filt.prob(paths)) and found.rounds == filt.rounds      # in a name alone
    file.write_bytes(whole)
    with safe_open(file, 'pt') as f:
        about = f.metadata()
    del about['sha256']
    save_file(filt.state_dict(), file, about)
    load_filter(file, space)
    changes = [dict(common=filt.common.detach().char()), dict(common=torch.full_like(filt.common, torch.nan)),
               dict(common=torch.zeros(1, 4)), dict(more=torch.zeros(1))]
    for change in changes:
        save_file({**filt.state_dict(), **change}, file, about)
        with pytest.raises(InputError, match='cannot be read as a filter'):
            load_filter(file, space)
    for change in dict(dim='no'), dict(dim='-1'), dict(rounds='x'), dict(kind='none'):
        save_file(filt.state_dict(), file, {**about, **change})
        with pytest.raises(InputError, match='cannot be read as a filter'):
            load_filter(file, space)


# -- checkpoints that cannot be listed

@pytest.mark.parametrize('code', [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_failed_listing_is_an_error(tmp_path, monkeypatch, code):
    "A run does not begin again because its checkpoints could not be listed once; none of them is removed."
    with Run.create(tmp_path, dict(seed=0), get_space('toy')) as run:
        for step in 1, 2:
            run.save(step, dict(w=torch.ones(3)))
    listdir = os.listdir

    def failing(path='.'):
        if str(path).endswith('checkpoint'):
            raise OSError(code, os.strerror(code), str(path))
        return listdir(path)

    monkeypatch.setattr(os, 'listdir', failing)
    with pytest.raises(RunError, match='cannot be listed'):
        Run.open(tmp_path).checkpoint()
    run = Run.create(tmp_path, dict(seed=0), get_space('toy'), resume=True)
    with pytest.raises(RunError, match='cannot be listed'):
        run.resume()
    with pytest.raises(RunError, match='cannot be listed'):
        run.save(3, dict(w=torch.ones(3)))
    run.close()
    monkeypatch.undo()
    assert [c.step for c in checkpoints(tmp_path)] == [2, 1]
    with Run.create(tmp_path, dict(seed=0), get_space('toy'), resume=True) as run:
        assert run.resume().step == 2


# -- links out of the folder

def snapshot(folder):
    "All files under `folder`, with their contents."
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob('*')) if f.is_file()}


@pytest.mark.parametrize('name', ['lock', 'events.jsonl', 'checkpoint', 'filters', 'heartbeat', 'config.json',
                                  'results.json', 'control.json'])
@pytest.mark.parametrize('resume', [False, True])
def test_links_are_not_followed(tmp_path, name, resume):
    "A link in the place of anything that a run writes: what it leads to stays as it is."
    others = tmp_path/'others'
    (others/'folder'/'000000001').mkdir(parents=True)
    (others/'folder'/'.000000002').mkdir()
    for file in '000000001/meta.json', '000000001/tensors.safetensors', '.000000002/meta.json', '000.safetensors':
        (others/'folder'/file).write_text('of others')
    (others/'file').write_text('{}')
    before = snapshot(others)
    folder = tmp_path/'run'
    folder.mkdir()
    space = get_space('toy')
    if resume:
        with Run.create(folder, dict(seed=0), space) as run:
            run.save(1, dict(w=torch.ones(3)))
        for file in folder.glob(name):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    (folder/name).symlink_to(others/('folder' if name in ('checkpoint', 'filters') else 'file'))
    try:
        with Run.create(folder, dict(seed=0), space, resume=resume) as run:
            run.beat(0)
            run.log('step', step=1)
            for step in range(2, 6):
                run.save(step, dict(w=torch.ones(3)))
            run.keep_filter(0, PathFilter(space, dim=4))
            run.finish('end', dict(steps=5))
    except InputError as e:
        assert str(e)
    assert snapshot(others) == before


def test_a_checkpoint_that_is_a_link_is_left_alone(tmp_path):
    "It is neither read nor removed, nor is what others put into a checkpoint's folder."
    others = tmp_path/'others'
    with Run.create(tmp_path/'run', dict(seed=0), get_space('toy')) as run:
        run.save(1, dict(w=torch.ones(3)))
        shutil.copytree(tmp_path/'run/checkpoint/000000001', others)
        before = snapshot(others)
        (tmp_path/'run/checkpoint/000000007').symlink_to(others)
        (tmp_path/'run/checkpoint/.000000008').symlink_to(others)
        (tmp_path/'run/checkpoint/000000001/notes.txt').write_text('mine')
        for step in 2, 3, 4:
            run.save(step, dict(w=torch.ones(3)))
    with Run.create(tmp_path/'run', dict(seed=0), get_space('toy'), resume=True) as run:
        assert run.resume().step == 4
    assert snapshot(others) == before
    assert [f.read_text() for f in (tmp_path/'run/checkpoint').rglob('notes.txt')] == ['mine']


def test_a_guessed_temporary_name_is_not_written_through(tmp_path):
    "The name of a temporary file cannot be known before."
    others = tmp_path/'others'
    others.write_text('of others')
    for guess in f'.file.{os.getpid()}', f'.file.{os.getpid()}.00000000':
        (tmp_path/guess).symlink_to(others)
    write_atomic(tmp_path/'file', 'new')
    assert (tmp_path/'file').read_text() == 'new' and others.read_text() == 'of others'


@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='needs named pipes')
def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path):
    "Nobody waits for a reader that never comes."
    for name in 'lock', 'events.jsonl':
        (tmp_path/name).mkdir()
        os.mkfifo(tmp_path/name/name)
        with pytest.raises(InputError, match='run folder|config.json'):
            Run.create(tmp_path/name, dict(seed=0), get_space('toy'))


# -- files of others

@pytest.mark.parametrize('name', ['events.jsonl', 'checkpoint/000000009/meta.json', 'filters/000.safetensors',
                                  'results.json', 'heartbeat'])
def test_a_new_run_does_not_take_over_files_of_others(tmp_path, name):
    "Nor goes on from a checkpoint that was left without its config."
    file = tmp_path/name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('of others')
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=f'holds {Path(name).parts[0].split(".")[0]} but no config.json'):
        Run.create(tmp_path, dict(seed=0), get_space('toy'), resume=True)
    with pytest.raises(InputError, match='but no config.json'):
        train_supernet(short(tmp_path), report=None)
    assert snapshot(tmp_path) == before


def test_no_run_in_the_root_or_home_folder(tmp_path, monkeypatch):
    "What is asked for by mistake is refused before anything is written."
    monkeypatch.setenv('HOME', str(tmp_path))
    before = sorted(Path('/').iterdir())
    for folder in '/', '/usr/..', tmp_path:
        with pytest.raises(InputError, match='is no place for a run'):
            Run.create(folder, dict(seed=0), get_space('toy'))
    assert sorted(Path('/').iterdir()) == before and not list(tmp_path.iterdir())


def test_a_start_that_failed_leaves_room_for_the_next(tmp_path):
    "As long as nothing happened in it, a run may be given another config; afterwards not."
    space = get_space('toy')
    Run.create(tmp_path, dict(seed=0), space).close()
    with Run.create(tmp_path, dict(seed=1), space) as run:
        assert not run.resumed and Run.open(tmp_path).config == dict(seed=1)
        run.log('start')
    with pytest.raises(InputError, match='another config: seed'):
        Run.create(tmp_path, dict(seed=2), space)


def test_a_name_from_a_file_leads_nowhere_else(tmp_path, monkeypatch):
    "A space called ../../elsewhere has its runs under runs/ like any other."
    from greedynasv2.detection import Backbone, DetectionConfig, detection_folder
    from greedynasv2.retraining import RetrainConfig, retrain_folder
    monkeypatch.chdir(tmp_path)
    spec = json.loads(get_space('toy').to_json()) | dict(name='../../elsewhere')
    space = SearchSpace.from_spec(spec)
    arch = Arch(space, space.encode('1111'), {})
    backbone = Backbone(arch, None, 'none', '')
    folders = [detection_folder(DetectionConfig(), backbone), retrain_folder(RetrainConfig(), arch)]
    assert [folder.resolve().parent for folder in folders] == [tmp_path/'runs'] * 2


# -- values that are not finite

@pytest.mark.parametrize('lr', [30., 1e4, 1e30])
def test_checkpoints_are_finite(tmp_path, lr):
    "At any learning rate: a run ends or stops, and what it has saved can be gone on from."
    try:
        run = train_supernet(short(tmp_path/'run', lr=lr, clip=0.), report=None)
    except InputError as e:
        run = Run.open(tmp_path/'run')
        assert run.status == 'stopped' and 'not finite' in str(e) and 'in another run_dir' in str(e)
        there = checkpoints(run.folder)
        assert (f'checkpoint is kept, of step {there[0].step}' if there else 'there is no checkpoint') in str(e)
    for found in checkpoints(run.folder):
        tensors = load_file(found.path/'tensors.safetensors')
        check_finite({k: v for k, v in tensors.items() if k.startswith(('net.', 'optimizer.'))}, 'checkpoint')
    if lr == 1e30:
        assert run.status == 'stopped'


@pytest.mark.slow
@pytest.mark.parametrize('lr', [30., 1e30])
def test_checkpoints_of_a_retraining_are_finite(tmp_path, lr):
    "Neither the weights nor their average."
    space = get_space('toy')
    write_arch(tmp_path/'arch.json', space, space.encode('1111'))
    cfg = retrain_config('demo', arch=str(tmp_path), run_dir=str(tmp_path/'run'), epochs=3, n_train=64, lr=lr, clip=0.,
                         log_every=2, device='cpu', save_every=0.)
    with suppress(InputError):
        retrain(cfg, report=None)
    assert checkpoints(tmp_path/'run')
    for found in checkpoints(tmp_path/'run'):
        check_finite(load_file(found.path/'tensors.safetensors'), 'checkpoint')


# -- strange folders under runs/

@pytest.mark.skipif(not hasattr(os, 'mkfifo'), reason='needs named pipes')
@pytest.mark.parametrize('strange', ['pipe', 'device', 'time', 'rows', 'nested'])
def test_a_strange_folder_hides_no_other_run(tmp_path, strange):
    "It is listed as what it is, at once."
    with Run.create(tmp_path/'good', dict(seed=0), get_space('toy')) as run:
        run.log('start')
    bad = tmp_path/'bad'
    shutil.copytree(tmp_path/'good', bad)
    about = json.loads((bad/'config.json').read_text())
    if strange == 'pipe':
        for name in 'events.jsonl', 'control.json', 'results.json':
            (bad/name).unlink(missing_ok=True)
            os.mkfifo(bad/name)
    elif strange == 'device':
        for name in 'events.jsonl', 'heartbeat', 'config.json':
            (bad/name).unlink(missing_ok=True)
            (bad/name).symlink_to('/dev/zero')
    elif strange == 'time':
        (bad/'config.json').write_text(json.dumps({**about, 'created': 1e30}))
    elif strange == 'rows':
        for row in about['space']['rows']:
            row[2] = 10**9
        (bad/'config.json').write_text(json.dumps(about))
    else:
        (bad/'config.json').write_text('[' * 100_000)
    began = time.monotonic()
    assert set(list_runs(tmp_path).name) == {'good', 'bad'}
    with suppress(InputError):
        run = Run.open(bad)
        asked_of(bad)
        run.read_control()
        run.events('step')
        assert run.status and not run.results
        run.facts_at()
    assert time.monotonic() - began < 5


# -- said plainly

def test_a_schedule_without_a_round_is_reported(tmp_path):
    "greedynasv2 of one epoch trains uniform paths, and says so; spos says nothing."
    said = []
    train_supernet(short(tmp_path/'run', method='greedynasv2', epochs=1, warmup_epochs=1), report=said.append)
    assert any('No round takes place in 1 epochs' in line and 'as spos does' in line for line in said)
    said = []
    train_supernet(short(tmp_path/'spos', epochs=1), report=said.append)
    assert not any('No round' in line for line in said)


def test_the_worker_that_failed_first_is_named(tmp_path):
    "The others lose their connections to it, and fail in the same second; one that was killed cannot say why."
    failures = {rank: SimpleNamespace(local_rank=rank, pid=100 + rank, exitcode=1) for rank in (0, 1)}
    error = SimpleNamespace(failures=failures, get_first_failure=lambda: (0, failures[0]))
    (tmp_path/'error-0.json').write_text(json.dumps(dict(known=False, time=2.5, text='Connection reset by peer')))
    (tmp_path/'error-1.json').write_text(json.dumps(dict(known=False, time=2.4, text='ZeroDivisionError')))
    assert first_failure(tmp_path, error) == 'worker 1 (process 101) ended: ZeroDivisionError'
    (tmp_path/'error-0.json').unlink()
    assert first_failure(tmp_path, error) == 'worker 0 (process 100) ended: exit code 1'


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='needs a device that is always full')
def test_a_full_disk_in_a_search_names_the_file(tmp_path):
    "Which file it was, and that the disk is full."
    space = get_space('toy')
    evaluate = CachedEvaluator(lambda paths: Scores(torch.ones(len(paths)), torch.ones(len(paths))), space,
                               tmp_path/'evaluations.jsonl', dict(run='x'))
    evaluate.file = Path('/dev/full')
    with pytest.raises(InputError, match='Evaluations cannot be written to /dev/full: the disk is full'):
        evaluate(space.sample(3))


# -- the archive of CIFAR-10

def cifar10_archive(file, shade):
    "A tiny archive: an image of one shade in each split."
    with tarfile.open(file, 'w:gz') as archive:
        for split in 'train', 'test':
            image = io.BytesIO()
            Image.new('RGB', (32, 32), (shade,) * 3).save(image, 'JPEG')
            member = tarfile.TarInfo(f'{split}/cat/0.jpg')
            member.size = image.tell()
            image.seek(0)
            archive.addfile(member, image)


def test_damaged_and_changed_archives_of_cifar10(tmp_path, monkeypatch):
    "Another archive is decoded again, a damaged cache too; a damaged archive is a sentence and leaves no cache."
    monkeypatch.setenv('GREEDYNASV2_DATA', str(tmp_path))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    archive = tmp_path/'cifar10_imagefolder.tar.gz'

    def shade():
        return load_cifar10_set(32)[0].images.float().mean().item()

    cifar10_archive(archive, 100)
    whole = archive.read_bytes()
    for damaged in b'', b'no archive', whole[:200], whole[:100] + b'xxxx' + whole[104:]:
        archive.write_bytes(damaged)
        with pytest.raises(InputError, match='cannot be read as CIFAR-10'):
            shade()
    assert not list(tmp_path.glob('cache/*/*'))
    archive.write_bytes(whole)
    assert shade() == pytest.approx(100, abs=2)
    cached, = tmp_path.glob('cache/*/*.safetensors')
    for damage in b'', b'x' * 100, cached.read_bytes()[:-1]:
        cached.write_bytes(damage)
        assert shade() == pytest.approx(100, abs=2)
    cifar10_archive(archive, 200)
    assert shade() == pytest.approx(200, abs=2)
