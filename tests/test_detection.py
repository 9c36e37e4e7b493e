"Detectors stand on any path that has the strides, learn, are measured as COCO does, and go on exactly where they were."
import json
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.ops import FrozenBatchNorm2d

from conftest import run_notebook
from greedynasv2.core import InputError, cache_dir
from greedynasv2.detection import (
    MEASURES,
    BoxView,
    DetectionTrainer,
    ModelConfig,
    as_coco,
    build_detector,
    coco_scores,
    detection_config,
    feature_blocks,
    find_network,
    fresh_backbone,
    load_batches,
    load_coco,
    load_detection,
    load_detector,
    make_pyramid,
    predict,
    read_coco,
    train_detector,
)
from greedynasv2.runs import Run, same_events, write_control
from greedynasv2.spaces import GREEDYNAS_B, Arch, get_space, write_arch
from greedynasv2.supernet import build_network, load_network, save_network

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(image_size=64, n_train=12, n_valid=4, batch_size=4, epochs=2, log_every=1, fpn_channels=16,
            head_channels=16, proposals=20, rois=8)


def arch_of(name='mbse', width=.1, path=None):
    "A narrow network of a space."
    space = get_space(name, width=width)
    return Arch(space, space.encode(GREEDYNAS_B) if path is None else path, {})


@pytest.fixture(scope='module')
def network(tmp_path_factory):
    "A folder of save_network whose batch norms have seen something."
    folder, arch = tmp_path_factory.mktemp('network'), arch_of()
    torch.manual_seed(0)
    net = build_network(arch.space, arch.path).train()
    for _ in range(5):
        net(torch.randn(4, 3, 64, 64))
    save_network(folder, net, arch.space, arch.path)
    return folder


def tiny(network, folder, **changes):
    "A run of seconds."
    return detection_config(**{**TINY, 'network': str(network), 'run_dir': str(folder), **changes})


def coco(folder, boxes, split='val', n_images=2, **changes):
    "A folder in COCO format: grey images of 40 x 30 pixels, category ids with gaps, ids from 0 on."
    for i in range(n_images):
        Image.new('RGB', (40, 30), 'grey').save(folder/f'{i}.png')
    rows = [dict(id=i, image_id=im, category_id=c, bbox=b, **more) for i, (im, c, b, more) in enumerate(boxes)]
    images = [dict(id=i, file_name=f'{i}.png', width=40, height=30) for i in range(n_images)]
    whole = dict(images=images, annotations=rows, categories=[dict(id=90, name='cat'), dict(id=3, name='dog')])
    (folder/f'{split}.json').write_text(json.dumps({**whole, **changes}))
    return folder/f'{split}.json'


@pytest.mark.parametrize('name, width', [('mbse', .1), ('mbse_mix', .1), ('mbse_mix_shuffle', .25), ('res50se', .05)])
def test_any_path_gives_features_at_four_strides(name, width):
    "Random paths, and the one of identities: the right sizes and channels, equal to the network's own without head."
    space = get_space(name, width=width)
    torch.manual_seed(0)
    for path in [torch.zeros(space.n_layers, dtype=torch.long), *space.sample(2)]:
        backbone = fresh_backbone(Arch(space, path, {}))
        row, names, channels = feature_blocks(backbone)
        body = make_pyramid(backbone, ModelConfig(fpn_channels=8)).body.eval()
        features = list(body(x := torch.randn(1, 3, 64, 96)).values())
        strides = zip(channels, (4, 8, 16, 32), strict=True)
        assert [tuple(f.shape) for f in features] == [(1, c, 64 // s, 96 // s) for c, s in strides]
        net = backbone.net.eval()
        assert torch.equal(features[-1], net.layers(net.stem(x)))
        def count(*parts): return sum(p.numel() for part in parts for p in part.parameters())
        assert count(body) == count(net.stem, net.layers) < count(net)


@pytest.mark.parametrize('detector', ['faster_rcnn', 'retinanet'])
@pytest.mark.parametrize('name, width', [('mbse_mix_shuffle', .25), ('res50se', .05)])
def test_both_detectors_train_and_predict_on_mobile_and_resnet_paths(detector, name, width):
    "Every learned value gets a finite gradient, also with an image that has no box; predictions stay inside the image."
    torch.manual_seed(0)
    space = get_space(name, width=width)
    backbone = fresh_backbone(Arch(space, space.sample(1)[0], {}))
    model = build_detector(backbone, 3, detection_config(detector=detector, **TINY)).train()
    x = [torch.rand(3, 64, 48), torch.rand(3, 50, 64)]
    boxes = [torch.tensor(b).view(-1, 4) for b in ([[4., 4, 40, 40]], [])]
    targets = [dict(boxes=b, labels=torch.ones(len(b)).long()) for b in boxes]
    sum(model(x, targets).values()).backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert {n.split('.')[1] for n in without} <= {'fpn'}, without       # Faster R-CNN's proposals may miss a level
    for image, found in zip(x, model.eval()(x), strict=True):
        assert found['boxes'].shape[1] == 4 and (found['boxes'] >= 0).all()
        assert (found['boxes'][:, 2] <= image.shape[2] + .01).all() and len(found['scores']) <= 100


def test_trained_weights_arrive_and_their_norms_stay(network):
    "The backbone of a trained network computes what the network does; a step moves convs, not batch norms."
    backbone, net = find_network(str(network)), load_network(network)
    model = build_detector(backbone, 3, detection_config(**TINY)).train()
    x, body = torch.randn(2, 3, 64, 64), model.backbone.body
    assert torch.allclose(list(body(x).values())[-1], net.layers(net.stem(x)), atol=1e-4)
    before = {k: v.clone() for k, v in body.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=.1)
    target = dict(boxes=torch.tensor([[4., 4, 40, 40]]), labels=torch.tensor([1]))
    sum(model(list(x), [target] * 2).values()).backward()
    optimizer.step()
    moved = {k for k, v in body.state_dict().items() if not torch.equal(v, before[k])}
    norms = {f'{n}.{k}' for n, m in body.named_modules() if isinstance(m, FrozenBatchNorm2d) for k in m.state_dict()}
    assert moved and norms and not moved & norms
    free = make_pyramid(find_network(str(network)), ModelConfig(freeze_bn=False)).body
    assert any('num_batches_tracked' in k for k in free.state_dict())


def test_normalisation_follows_arch_json(network, tmp_path):
    "An arch.json that gives mean and std of its images is obeyed, also when the run is read again."
    arch = arch_of()
    write_arch(tmp_path/'arch.json', arch.space, arch.path, mean=[.1, .2, .3], std=[.4, .5, .6])
    run = train_detector(tiny(tmp_path/'arch.json', tmp_path/'run', epochs=1), report=None)
    model = load_detector(run)
    assert (model.transform.image_mean, model.transform.image_std) == ([.1, .2, .3], [.4, .5, .6])


def test_category_ids_with_gaps_crowds_and_ids_from_zero(tmp_path, capsys):
    "What is found in the right place counts, in a crowd it neither counts nor hurts; nothing is printed."
    crowd = dict(iscrowd=1)
    boxes = [(0, 3, [5, 5, 10, 10], {}), (1, 90, [1, 1, 8, 9], {}), (0, 3, [20, 0, 20, 30], crowd)]
    data = read_coco(coco(tmp_path, boxes))
    assert [t['labels'].tolist() for _, t in BoxView(data)] == [[1], [2]] and data.classes == ['dog', 'cat']
    def detected(boxes, labels, scores):
        return dict(boxes=torch.tensor(boxes), labels=torch.tensor(labels), scores=torch.tensor(scores))
    found = [detected([[22., 3, 30, 12], [5, 5, 15, 15]], [1, 1], [.9, .8]),
             detected([[1., 1, 9, 10], [0, 0, 30, 30]], [2, 0], [.7, .99])]
    rows = as_coco(found, data.truth)
    assert [r['category_id'] for r in rows] == [3, 3, 90]              # the background is no class
    scores = coco_scores(data.truth, rows)
    assert tuple(scores) == MEASURES and scores['mAP'] == pytest.approx(1) and scores['AP_large'] is None
    without = dict(data.truth, annotations=[a for a in data.truth['annotations'] if not a['iscrowd']])
    assert coco_scores(without, rows)['mAP'] == pytest.approx(.75, abs=.01)        # no crowd: the same box is a mistake
    assert coco_scores(data.truth, [])['mAP'] == 0
    assert capsys.readouterr().out == ''


def test_coco_s_own_layout(tmp_path):
    "annotations/instances_train2017.json with train2017/; images without boxes are measured, not trained on."
    for split in ('train', 'val'):
        for name in ('annotations', f'{split}2017'):
            (tmp_path/name).mkdir(exist_ok=True)
        file = coco(tmp_path/f'{split}2017', [(0, 3, [5, 5, 10, 10], {}), (0, 90, [39.5, 0, 9, 9], {})])
        file.rename(tmp_path/f'annotations/instances_{split}2017.json')
    train, valid = load_coco(tmp_path)
    assert (len(train), len(valid), train.left_out, train.files[0].parent.name) == (1, 2, 1, 'train2017')
    box = BoxView(train)[0][1]['boxes']
    assert box.tolist() == [[5, 5, 15, 15]]


BOX = [(0, 3, [5, 5, 10, 10], {})]


@pytest.mark.parametrize('boxes, changes, sentence', [
    ([(9, 3, [5, 5, 9, 9], {})], {}, 'has image_id 9, which the file does not list'),
    ([(0, 1, [5, 5, 9, 9], {})], {}, 'has category_id 1, which the file does not list'),
    ([(0, 3, [5, 5, 9], {})], {}, 'needs bbox: x, y, width and height'),
    ([(0, 3, 'big', {})], {}, 'needs bbox: x, y, width and height'),
    ([(0, 3, [5, 5, float('nan'), 9], {})], {}, 'needs bbox: x, y, width and height'),
    ([(0, 3, [5, 5, 9, -9], {})], {}, 'has no box to learn from'),
    (BOX, dict(images=[]), 'lists no images'),
    (BOX, dict(images='all'), 'it has no list of images'),
    (BOX, dict(categories=[dict(id=3)]), 'needs name, text'),
    (BOX, dict(images=[dict(id=0, file_name='0.png', width=40)]), 'needs height, a whole number'),
    (BOX, dict(images=[dict(id=0, file_name='0.png', width=40, height=30)] * 2), '2 image entries under 1 ids'),
    (BOX, dict(images=[dict(id=0, file_name='gone.png', width=40, height=30)]), 'names 1 images; 1 of them are not in'),
    (BOX, dict(images=[dict(id=0, file_name='../0.png', width=40, height=30)]), 'which is outside of its folder'),
])
def test_bad_annotations_are_refused_by_a_sentence(tmp_path, boxes, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        read_coco(coco(tmp_path, boxes, **changes))


def test_other_bad_input_is_refused_by_a_sentence(tmp_path, network, monkeypatch):
    "Before anything is trained, and before a run folder is made."
    (tmp_path/'val.json').write_text('{"images": ')
    with pytest.raises(InputError, match='cannot be read as COCO annotations'):
        read_coco(tmp_path/'val.json')
    def run(where=network, **given): return train_detector(tiny(where, tmp_path/'run', **given))
    with pytest.raises(InputError, match='There is no folder'):
        run(data=str(tmp_path/'no'))
    with pytest.raises(InputError, match='has neither train.json nor'):
        run(data=str(tmp_path))
    with pytest.raises(InputError, match="Unknown detector 'fcos'"):
        tiny(network, tmp_path/'run', detector='fcos')
    toy = get_space('toy')
    write_arch(tmp_path/'arch.json', toy, toy.sample(1)[0])
    with pytest.raises(InputError, match='a detector needs 4, 8, 16 and 32'):
        run(tmp_path/'arch.json')
    coco(tmp_path, BOX, 'train'), coco(tmp_path, BOX, 'val', categories=[dict(id=3, name='dog')])
    with pytest.raises(InputError, match='categories of train and val differ'):
        load_coco(tmp_path)
    (tmp_path/'0.png').write_bytes(b'no image')
    with pytest.raises(InputError, match='cannot be read as an image'):
        BoxView(read_coco(tmp_path/'train.json'))[0]
    monkeypatch.setitem(sys.modules, 'pycocotools.coco', None)
    with pytest.raises(InputError, match=r"pip install 'greedynasv2\[detection\]'"):
        run()
    assert not (tmp_path/'run').exists()


def test_a_batch_in_chunks_is_the_batch(network, tmp_path):
    "RetinaNet with frozen norms: the same step."
    after = []
    for chunk in (0, 1, 3):
        trainer = DetectionTrainer(tiny(network, tmp_path/str(chunk), detector='retinanet', chunk=chunk), report=None)
        with trainer.run:
            trainer.train_step(*next(load_batches(BoxView(trainer.data.train), [[0, 1, 2, 3]])))
        after.append(trainer.net.state_dict())
    for other in after[1:]:
        assert all(torch.allclose(v, other[k], atol=1e-5) for k, v in after[0].items())


def test_losses_that_are_no_numbers_end_the_run_with_a_sentence(network, tmp_path):
    "The run says so, and keeps its last good checkpoint."
    train_detector(tiny(network, tmp_path/'good', epochs=1), report=None)
    with pytest.raises(InputError, match=r'2 consecutive losses were not finite.*Lower lr \(1e\+20\)'):
        train_detector(tiny(network, tmp_path/'run', lr=1e20, lr_warmup=0, clip=0., epochs=9, max_bad=2), report=None)
    run = Run.open(tmp_path/'run')
    assert run.status == 'stopped' and 'not finite' in run.status_text and len(run.events('warning'))
    for tensors in [c[1] for c in [run.checkpoint()] if c]:
        assert all(v.isfinite().all() for v in tensors.values())


@pytest.mark.slow
def test_a_killed_run_ends_as_if_nothing_had_happened(network, tmp_path, start):
    "SIGKILL in the middle of the second epoch: same events, same weights; stopped by hand, too."
    whole = train_detector(tiny(network, tmp_path/'whole', epochs=3), report=None)
    cfg = tiny(network, tmp_path/'killed', epochs=3, save_every=0.)
    process = start(cfg)
    for _ in range(600):
        if (tmp_path/'killed/events.jsonl').exists() and len(Run.open(tmp_path/'killed').events('step')) >= 4:
            break
        time.sleep(.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    assert Run.open(tmp_path/'killed').status == 'dead'
    killed = train_detector(cfg, report=None)
    assert killed.events('resume').step.iloc[0] >= 3
    assert same_events(whole, killed) == [] and whole.results == killed.results
    a, b = whole.checkpoint()[1], killed.checkpoint()[1]
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_stopped_by_hand_it_goes_on(network, tmp_path):
    "control.json stops a run within a step, also before anything was measured."
    whole = train_detector(tiny(network, tmp_path/'whole'), report=None)
    cfg = tiny(network, tmp_path/'cut')
    trainer = DetectionTrainer(cfg, report=None)
    write_control(tmp_path/'cut', stop=True)
    assert trainer.train().status == 'stopped'
    ended = train_detector(cfg, report=None)
    def events(run): return [e for e in run.events()[['kind', 'step']].values.tolist() if e[0] in ('step', 'eval')]
    assert ended.status == 'ended' and events(whole) == events(ended) and whole.results == ended.results
    model, data = load_detector(ended), load_coco(cache_dir()/'shapes-64-12-4-0')[1]
    assert coco_scores(data.truth, as_coco(predict(model, data), data.truth))['mAP'] == ended.results['mAP']


@pytest.mark.slow
def test_it_learns(tmp_path):
    "Faster R-CNN from fresh weights finds the shapes of the eight images it is trained on."
    arch = arch_of(width=.25)
    write_arch(tmp_path/'arch.json', arch.space, arch.path)
    cfg = detection_config(network=str(tmp_path/'arch.json'), run_dir=str(tmp_path/'run'), n_train=8, n_valid=2,
                      image_size=64, batch_size=8, epochs=100, lr_warmup=5, flip=0.)
    task = load_detection(cfg)
    trainer = DetectionTrainer(cfg, None, task._replace(valid=task.train))
    trainer.end_epoch = lambda epoch: None
    trainer.train()
    scores = trainer.evaluate()
    assert scores['mAP'] > .25, scores      # 0.35 to 0.58 with seeds 0, 1 and 2


@pytest.mark.slow
def test_notebook_runs_headless(network, tmp_path, monkeypatch):
    "Papermill runs it from another folder; a typo in a parameter stops it."
    import papermill
    monkeypatch.chdir(tmp_path)
    small = dict(network=str(network), image_size=64, n_train=8, n_valid=4, batch_size=4, epochs=1, run_dir='run')
    out = tmp_path/'out.ipynb'
    def run(**more): return run_notebook('transfer_detection', out, {**small, **more})
    run()
    assert out.stat().st_size < 3e6 and Run.open(tmp_path/'run').status == 'ended'
    with pytest.raises(papermill.PapermillExecutionError, match="Did you mean 'detector'"):
        run(detectr='retinanet')
