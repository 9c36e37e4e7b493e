"Retraining follows its recipes, survives what may happen to it, and what it exports can be loaded by anyone."
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from torch import nn

from greedynasv2.core import InputError
from greedynasv2.data import load_data
from greedynasv2.retraining import (
    Retrainer,
    as_markdown,
    export_network,
    export_onnx,
    export_program,
    find_arch,
    load_retrain,
    network_svg,
    retrain,
    retrain_config,
    retrained,
)
from greedynasv2.runs import Run, pack, same_events
from greedynasv2.spaces import get_space, read_arch, write_arch
from greedynasv2.supernet import SuperNet, load_network
from test_training import same_weights, weights

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(epochs=3, n_train=200, batch_size=20, lr=.02, log_every=5, dropout=.2)


@pytest.fixture
def arch(tmp_path):
    "arch.json of a toy network."
    space = get_space('toy')
    write_arch(tmp_path/'found'/'arch.json', space, space.encode('1203'), scores=dict(loss=.5, acc=80.))
    return tmp_path/'found'/'arch.json'


def small(arch, folder, **changes):
    "A retraining of seconds."
    return retrain_config('demo', arch=str(arch), run_dir=str(folder), **{**SMALL, **changes})


def make_folder(root, n_classes=3, n=6, size=24):
    "Images of random pixels, a folder a class."
    rng = torch.Generator().manual_seed(0)
    for split in ('train', 'val'):
        for c in range(n_classes):
            (root/split/f'class {c}').mkdir(parents=True)
            for i in range(n):
                pixels = torch.randint(256, (size, size, 3), generator=rng, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(root/split/f'class {c}'/f'{i}.png')
    return root


# --- recipes

def test_recipes_are_the_papers(arch):
    "Numbers of Section 5.1, and of the field where the paper is silent."
    mobile, resnet = (retrain_config(r, arch=str(arch)) for r in ('mobile', 'resnet'))
    assert (mobile.optimizer, mobile.lr, mobile.batch_size, mobile.epochs) == ('rmsproptf', .048, 96*8, 450)
    assert (mobile.schedule, mobile.decay_rate, mobile.decay_epochs, mobile.warmup_epochs) == ('step', .97, 2.4, 3)
    assert (mobile.weight_decay, mobile.decay_all, mobile.dropout, mobile.label_smoothing) == (1e-5, False, .2, .1)
    assert (resnet.optimizer, resnet.lr, resnet.batch_size) == ('sgd', .6, 1536)
    assert (resnet.epochs, resnet.schedule) == (240, 'cosine')
    assert (resnet.weight_decay, resnet.warmup_epochs, resnet.dropout, resnet.momentum) == (1e-4, 5, 0, .9)
    for cfg in (mobile, resnet):
        assert (cfg.ema_decay, cfg.auto_augment, cfg.erase) == (.9999, 'original', .2)


def test_the_network_chooses_the_recipe(tmp_path, arch):
    "Bottlenecks get the recipe of ResNets, digits the demo."
    space = get_space('res50se', width=.25)
    write_arch(tmp_path/'res'/'arch.json', space, space.sample(1)[0])
    def chosen(file, data): return retrain_config(arch=str(file), data=data).recipe
    assert chosen(tmp_path/'res', 'cifar10') == 'resnet'
    assert chosen(arch, 'cifar10') == 'mobile' and chosen(arch, 'digits') == 'demo'


@pytest.mark.parametrize('recipe', ['mobile', 'resnet'])
def test_recipes_become_timms_parts(tmp_path, arch, recipe):
    "Optimizer, weight decay, schedule, dropout and average are what the recipe says, step by step."
    cfg = retrain_config(recipe, arch=str(arch), run_dir=str(tmp_path/'run'), n_workers=0, epochs=48, batch_size=100,
                         n_train=1000)
    trainer = Retrainer(cfg, report=None)
    groups, per_epoch = trainer.optimizer.param_groups, trainer.steps_per_epoch
    flat = {id(p) for p in trainer.net.parameters() if p.ndim <= 1}
    kinds = {g['weight_decay']: {id(p) in flat for p in g['params']} for g in groups}
    lr = []
    for epoch in (0, .5*cfg.warmup_epochs, cfg.warmup_epochs, 24, 47.9):
        trainer.scheduler.step_update(round(epoch * per_epoch))
        lr.append(groups[0]['lr'])
    assert lr[0] < 1e-4 and .3*cfg.lr < lr[1] < .7*cfg.lr
    if recipe == 'mobile':
        assert type(trainer.optimizer).__name__ == 'RMSpropTF'
        assert groups[0]['eps'] == 1e-3 and groups[0]['momentum'] == .9
        assert kinds == {0.: {True}, 1e-5: {False}}
        def n(epoch): return round(epoch * per_epoch) // round(cfg.decay_epochs * per_epoch, 9)
        assert lr[3] == pytest.approx(.048 * .97**n(24), rel=1e-6) and lr[4] < lr[3] < lr[2]
    else:
        assert type(trainer.optimizer).__name__ == 'SGD' and groups[0]['nesterov'] and set(kinds) == {1e-4}
        assert lr[3] == pytest.approx(.3, rel=.01) and lr[4] < .01
    assert [m.p for m in trainer.net.modules() if isinstance(m, nn.Dropout)] == [cfg.dropout]
    assert trainer.ema.decay == .9999 and trainer.criterion.label_smoothing == .1
    trainer.run.close()


def test_mobile_recipe_takes_steps(tmp_path, arch):
    "RMSProp, AutoAugment and erasing work together, and the loss is a number."
    cfg = retrain_config('mobile', arch=str(arch), run_dir=str(tmp_path/'run'), epochs=1, n_train=64, batch_size=16,
                         n_workers=0, lr=.001)
    run = retrain(cfg, report=None)
    assert run.status == 'ended' and run.events('step').loss.notna().all()


# --- augmentation

def test_augmentation_follows_seed_epoch_and_image():
    "With AutoAugment and erasing: the same pixels in any process and from any batch on, others in another epoch."
    data, more = load_data('digits', 16, seed=3).joined(60), dict(policy='original', erase=.5)
    def pixels(**kw): return [x for x, _ in data.batches(20, **{'epoch': 1, **more, **kw})]
    one = pixels()
    random.random()                                   # what the rest of the program draws does not matter
    assert all(torch.equal(a, b) for a, b in zip(one, pixels(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one, pixels(n_workers=2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one[1:], pixels(start=1), strict=True))
    for other in (dict(epoch=2), dict(policy=''), dict(erase=0.)):
        assert not torch.equal(one[0], pixels(**other)[0])
    random.seed(1)
    a = random.random()
    random.seed(1)
    pixels()
    assert random.random() == a


def test_erasing_leaves_the_rest_alone():
    "Pixels are as they were, or noise in one rectangle; about as many images are erased as were asked for."
    data = load_data('digits', 32).joined(300)
    plain, erased = (torch.cat([x for x, _ in data.batches(100, augment='none', erase=e)]) for e in (0., .5))
    changed = (plain != erased).any(1)
    touched = changed.flatten(1).any(1)
    assert .35 < touched.float().mean() < .65
    for mask in changed[touched]:
        rows, columns = mask.any(1).nonzero(), mask.any(0).nonzero()
        box = mask[rows.min():rows.max() + 1, columns.min():columns.max() + 1]
        assert box.float().mean() > .6                # clipped noise may equal a pixel here and there
    assert torch.equal(plain[~touched], erased[~touched])


# --- resume

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A small run that was left alone."
    folder, space = tmp_path_factory.mktemp('whole'), get_space('toy')
    write_arch(folder/'arch.json', space, space.encode('1203'), scores=dict(loss=.5, acc=80.))
    return retrain(small(folder/'arch.json', folder/'run'), report=None)


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_the_same(tmp_path, arch, start):
    "SIGKILL while it trains, several times: same events, same tensors, same results as a run left alone."
    more = dict(epochs=6, auto_augment='original', erase=.3, save_every=0.)
    whole = retrain(small(arch, tmp_path/'whole', **more), report=None)
    cfg, rng, kills = small(arch, tmp_path/'killed', **more), random.Random(0), []
    while len(kills) < 2:
        process, steps = start(cfg), rng.randint(6, 12)
        events = tmp_path/'killed'/'events.jsonl'
        before = events.stat().st_size if events.exists() else 0
        while process.poll() is None and (not events.exists() or events.stat().st_size < before + 150*steps):
            time.sleep(.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        assert process.communicate()[1] is not None and process.returncode in (0, -signal.SIGKILL)
        if process.returncode == 0:
            break
        kills.append(Run.open(tmp_path/'killed').checkpoint())
    assert any(k and k[0] for k in kills)             # at least one in the middle of training
    killed = retrain(cfg, report=None)
    assert killed.status == 'ended' and same_events(whole, killed) == []
    assert same_weights(weights(whole), weights(killed)) and whole.results == killed.results


@pytest.mark.parametrize('place, call',
                         [('Retrainer.end_epoch', 2), ('Retrainer.results', 1), ('Retrainer.train_step', 17)])
def test_dead_where_it_hurts(tmp_path, arch, monkeypatch, whole, place, call):
    "Cut off in a test, after the last checkpoint, within an epoch: the next start ends as if nothing had happened."
    cfg, name = small(arch, tmp_path/'cut', save_every=0.), place.split('.')[1]
    old, calls = getattr(Retrainer, name), []
    def dies(self, *args):
        calls.append(0)
        if len(calls) == call:
            raise SystemExit(9)
        return old(self, *args)
    monkeypatch.setattr(Retrainer, name, dies)
    # A dead process writes no last words
    monkeypatch.setattr(Run, 'finish', lambda self, *args, **kw: self.close())
    with pytest.raises(SystemExit):
        retrain(cfg, report=None)
    monkeypatch.undo()
    assert Run.open(cfg.run_dir).status == 'dead'
    cut = retrain(cfg, report=None)
    assert same_events(whole, cut) == [] and same_weights(weights(whole), weights(cut)) and whole.results == cut.results


def test_stopped_by_control_it_goes_on(tmp_path, arch, whole, stop_at):
    "A stop is obeyed between steps; started again, the run ends with the same weights."
    cfg = small(arch, tmp_path/'cut')
    cut = stop_at(Retrainer(cfg, report=None), 13).train()
    assert cut.status == 'stopped' and cut.status_text == 'asked to stop' and cut.checkpoint()[0] == 13
    cut = retrain(cfg, report=None)
    assert cut.status == 'ended' and same_weights(weights(whole), weights(cut))
    said = []
    assert retrain(cfg, report=said.append).results == cut.results and 'has ended already' in said[0]
    with pytest.raises(InputError, match='holds a run of another config: lr'):
        retrain(cfg.replace(lr=.5), report=None)


def test_losses_that_are_no_numbers(tmp_path, arch):
    "Bad steps change neither weights nor average and are reported; too many in a row end the run with a sentence."
    trainer = Retrainer(small(arch, tmp_path/'some', epochs=1), report=None)
    step, kept = trainer.train_step, {}
    def sometimes(x, y):
        bad = trainer.step in (6, 7)
        if bad:
            before = trainer.state()[0]
            kept.update({k: v.clone() for k, v in before.items() if not k.startswith('model.') or 'running' not in k})
        step(x * float('inf') if bad else x, y)
        now = trainer.state()[0]
        if bad:
            assert all(torch.equal(v, now[k]) for k, v in kept.items() if 'num_batches' not in k)
    trainer.train_step = sometimes
    run = trainer.train()
    assert kept and run.status == 'ended'
    assert run.events('warning').message.str.contains('2 of 5 steps were skipped').any()
    assert all(v.isfinite().all() for v in weights(run).values() if v.is_floating_point())
    trainer = Retrainer(small(arch, tmp_path/'all'), report=None)
    criterion = trainer.criterion
    trainer.criterion = lambda logits, y: criterion(logits, y) * (float('nan') if trainer.step >= 12 else 1)
    with pytest.raises(InputError, match='consecutive losses were not finite'):
        trainer.train()
    assert Run.open(tmp_path/'all').status == 'stopped'


# --- weights and data

def test_inherited_weights(tmp_path, arch):
    "Taken from the run that arch.json names, also when that is a relative path; kept when the supernet moves on."
    space = get_space('toy')
    found = read_arch(arch)
    torch.manual_seed(0)
    net = SuperNet(space)
    with Run.create(arch.parent/'supernet', dict(method='spos'), space) as run:
        run.save(0, pack('net', net.state_dict()))
    write_arch(arch, space, found.path, run='supernet')
    cfg = small(arch, tmp_path/'heir', inherit='arch')
    trainer = Retrainer(cfg, report=None)
    assert all(torch.equal(v, trainer.net.state_dict()[k]) for k, v in net.subnet(found.path).state_dict().items())
    def dies(x, y): raise SystemExit(9)
    trainer.train_step = dies
    with pytest.raises(SystemExit):
        trainer.train()
    with Run.create(arch.parent/'supernet', dict(method='spos'), space, resume=True) as run:
        run.save(1, pack('net', SuperNet(space).state_dict()))
    again = Retrainer(cfg, report=None)
    assert torch.equal(again.net.stem[0][0].weight, net.stem[0][0].weight) and again.run.config['inherit'] == 'supernet'
    again.run.close()


def test_a_dropped_op_is_not_inherited(tmp_path, arch):
    "A path that the supernet no longer has is refused with a sentence, and no run folder is made."
    space = get_space('toy')
    space.drop(0, 1)
    with Run.create(tmp_path/'supernet', dict(method='spos'), space) as run:
        run.save(0, pack('net', SuperNet(space).state_dict()))
    with pytest.raises(InputError, match='was dropped from layer 0'):
        retrain(small(arch, tmp_path/'run', inherit=str(tmp_path/'supernet')), report=None)
    assert not (tmp_path/'run').exists()


def test_other_data_gets_another_classifier(tmp_path, arch):
    "Found for ten classes, trained on three, read from files: the classifier is new, and the notes say so."
    folder = make_folder(tmp_path/'photos')
    cfg = retrain_config('demo', arch=str(arch), data=str(folder), image_size=16, epochs=1, batch_size=6,
                         run_dir=str(tmp_path/'run'))
    task = load_retrain(cfg)
    assert re.search('found for 10 classes; .*photos has 3: it gets a new classifier', task.notes[0])
    run = retrain(cfg, report=None, task=task)
    model, out = retrained(run)
    assert model.head[-1].out_features == 3 and out.facts['classes'] == ['class 0', 'class 1', 'class 2']
    assert run.results['top5'] == 100


def test_bad_input_is_answered_with_a_sentence(tmp_path, arch):
    "Before any work starts, and without a run folder."
    good = json.loads(arch.read_text())
    def refused(says, text=None, **changes):
        file = arch if text is None else tmp_path/'bad.json'
        if text is not None:
            file.write_text(text)
        with pytest.raises(InputError, match=says):
            retrain(small(file, tmp_path/'run', **changes), report=None)
        assert not (tmp_path/'run').exists()
    refused('cannot be read as arch.json', '{"space": ')
    refused('is no arch.json: it lacks', '{"model": "resnet50"}')
    refused('is no arch.json', '[1, 2]')
    refused('Unknown op', json.dumps({**good, 'path': ['MB9_K9', *good['path'][1:]]}))
    refused('was written for other ops', json.dumps({**good, 'flops': 1}))
    refused('There is no folder', data=str(tmp_path/'nothing'))
    refused('digits has 200 training images', batch_size=1000)
    refused('does not say which run it came from', inherit='arch')
    refused('is no run: it has no config.json', inherit=str(tmp_path/'nothing'))
    refused("Did you mean 'cosine'", schedule='cosin')
    refused('needs at least 2 images', batch_size=1)
    with Run.create(tmp_path/'empty', dict(method='spos'), get_space('toy')):
        pass
    refused('has no weights of a supernet to inherit', inherit=str(tmp_path/'empty'))
    wide = get_space('toy', width=2.)
    with Run.create(tmp_path/'wide', dict(method='spos'), wide) as run:
        run.save(0, pack('net', SuperNet(wide).state_dict()))
    refused('do not fit: its space is toy', inherit=str(tmp_path/'wide'))
    with pytest.raises(InputError, match='is no retraining run'):
        export_network(tmp_path/'wide')
    with pytest.raises(InputError, match='is no run'):
        export_network(tmp_path)


def test_weights_that_do_not_fit_are_not_exported(tmp_path, arch):
    "A checkpoint of another network in a run folder, and a run that has none."
    cfg = small(arch, tmp_path/'run')
    trainer = Retrainer(cfg, report=None)
    with pytest.raises(InputError, match='has no checkpoint yet'):
        export_network(tmp_path/'run')
    tensors, meta = trainer.state()
    trainer.run.save(0, {k: v.new_zeros(3) if k == 'ema.head.4.weight' else v for k, v in tensors.items()}, meta)
    trainer.run.close()
    with pytest.raises(InputError, match='The network in the checkpoint does not fit'):
        export_network(tmp_path/'run')


# --- export

@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    "A network trained for a moment, and its folder."
    folder = tmp_path_factory.mktemp('export')
    space = get_space('toy')
    write_arch(folder/'arch.json', space, space.encode('1203'), scores=dict(loss=.5, acc=80.))
    run = retrain(small(folder/'arch.json', folder/'run', epochs=1), report=None)
    return run, export_network(run, onnx=False, report=None)


def test_it_loads_where_nothing_else_does(exported, tmp_path):
    "A fresh process that imports what inference needs, and no more, gives the same outputs."
    run, folder = exported
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.save(x, tmp_path/'x.pt')
    code = ('import sys, torch\nfrom greedynasv2.supernet import load_network\n'
            'model = load_network(sys.argv[1])\ntorch.save(model(torch.load(sys.argv[2])).detach(), sys.argv[3])\n'
            'needless = ["timm", "pymoo", "plotly", "sklearn", "greedynasv2.training", "greedynasv2.retraining"]\n'
            'print([m for m in needless if m in sys.modules])')
    done = subprocess.run([sys.executable, '-c', code, folder, tmp_path/'x.pt', tmp_path/'y.pt'], capture_output=True,
                          text=True,
                          cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '[]' and torch.equal(torch.load(tmp_path/'y.pt'), retrained(run)[0](x))


def test_the_average_is_what_is_exported(exported):
    "Not the weights of the last step."
    run, folder = exported
    tensors, loaded = weights(run), load_network(folder).state_dict()
    assert all(torch.equal(v, tensors[f'ema.{k}']) for k, v in loaded.items())
    assert any(not torch.equal(v, tensors[f'model.{k}']) for k, v in loaded.items())


def test_the_program_takes_any_number_of_images(exported):
    "model.pt2, one image and many."
    run, folder = exported
    program, model = torch.export.load(folder/'model.pt2').module(), load_network(folder)
    for n in (1, 7):
        x = torch.randn(n, 3, 16, 16)
        assert torch.allclose(program(x), model(x), atol=1e-5)
    wrong = nn.Sequential(nn.Flatten(), nn.Dropout(.5))      # gives other outputs each time
    with pytest.raises(InputError, match='gives other outputs'):
        export_program(wrong.train(), torch.rand(2, 3, 4, 4), folder/'wrong.pt2')
    (folder/'wrong.pt2').unlink()


@pytest.mark.slow
def test_onnx(exported, tmp_path):
    "The same network through onnxruntime."
    for name in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(name, reason=f"{name} is not installed; get it by pip install 'greedynasv2[onnx]'")
    import onnxruntime
    model, x = load_network(exported[1]), torch.rand(2, 3, 16, 16)
    assert export_onnx(export_program(model, x, tmp_path/'model.pt2'), model, x, tmp_path/'model.onnx') == ''
    session, x = onnxruntime.InferenceSession(tmp_path/'model.onnx'), torch.randn(5, 3, 16, 16)
    assert torch.allclose(torch.from_numpy(session.run(None, {'images': x.numpy()})[0]), model(x), atol=1e-4)


def test_without_onnx_a_sentence_says_how_to_get_it(exported, tmp_path, monkeypatch):
    "The rest is exported; an older model.onnx does not stay."
    monkeypatch.setitem(sys.modules, 'onnx', None)
    (tmp_path/'model.onnx').write_text('old')
    said = []
    folder = export_network(exported[0], tmp_path, report=said.append)
    assert "pip install 'greedynasv2[onnx]'" in said[0] and not (tmp_path/'model.onnx').exists()
    assert '`model.pt2`' in (folder/'README.md').read_text() and '`model.onnx`' not in (folder/'README.md').read_text()


def test_the_model_card(exported, tmp_path, monkeypatch, capsys):
    "It says what the network is, and the code in it runs."
    run, folder = exported
    card = (folder/'README.md').read_text()
    arch = read_arch(folder/'arch.json')
    for said in (f'{arch.costs["flops"]:,}', f'{arch.costs["params"]:,}', f'{run.results["top1"]:.2f} %', 'demo: sgd',
                 'digits', '80.00 %',
                 'network.svg', 'MB3\\_K3'):
        assert said in card, said
    monkeypatch.chdir(folder)
    Image.new('RGB', (16, 16)).save('image.png')
    exec(re.search('```python\n(.*?)```', card, re.S)[1], {})
    assert capsys.readouterr().out.strip() in arch.facts['classes']
    Path('image.png').unlink()


def test_names_are_escaped(exported):
    "Names that look like HTML, Markdown or XML are shown letter by letter."
    assert as_markdown('<img src=x> | `a` [b](c)\n# d') == '&lt;img src=x&gt; \\| \\`a\\` \\[b\\](c) # d'
    space = get_space('toy')
    rows = space.rows(space.encode('1203')).assign(op='</text><script>&"')
    drawing = ElementTree.fromstring(network_svg(rows, '<b>"&'))
    assert not drawing.findall('.//{*}script')
    assert '</text><script>&"' in [t.text for t in drawing.findall('.//{*}text')]


# --- the notebook

def papermill(cwd, *parameters):
    "nbs/retrain.ipynb from another folder: exit code and output."
    given = [a for k, v in parameters for a in ('-p', k, str(v))]
    return subprocess.run([Path(sys.executable).with_name('papermill'), '--no-progress-bar', '--log-output',
                           ROOT/'nbs/retrain.ipynb', cwd/'out.ipynb', *given], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': str(ROOT)})


@pytest.mark.slow
def test_the_notebook(tmp_path, arch):
    "By default it takes the newest arch.json under runs/, says so first, and ends with a network that can be loaded."
    (tmp_path/'runs').mkdir()
    arch.parent.rename(tmp_path/'runs'/'found')
    done = papermill(tmp_path, ('epochs', 2), ('n_train', 200))
    assert done.returncode == 0, done.stderr
    said = done.stderr + done.stdout
    assert 'runs/found/arch.json: 1203 of toy' in said and 'Recipe:  demo' in said and 'epoch 2/2: loss' in said
    folder, = (tmp_path/'runs').glob('retrain-toy-1203-0/network')
    assert load_network(folder)(torch.rand(1, 3, 16, 16)).shape == (1, 10)
    assert (tmp_path/'out.ipynb').stat().st_size < 3e6
    assert find_arch(root=tmp_path/'runs') == tmp_path/'runs'/'found'/'arch.json'


@pytest.mark.slow
@pytest.mark.parametrize('given, says',
                         [(('epoch', 2), "Did you mean 'epochs'?"), (('seed', 0), 'There is no arch.json under')])
def test_the_notebook_refuses(tmp_path, given, says):
    "A parameter that does not exist; no network to train."
    done = papermill(tmp_path, given)
    assert done.returncode != 0 and says in done.stderr + done.stdout
