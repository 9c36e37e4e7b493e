"Splits, order and augmentation follow from the seed; bad folders are answered with a sentence."
import pytest
import torch
from PIL import Image

from greedynasv2.core import InputError
from greedynasv2.data import load_data


def make_folder(root, splits=('train', 'val'), classes=('cat', 'dog'), n=12):
    "A small image folder whose images all differ."
    rng = torch.Generator().manual_seed(0)
    for split in splits:
        for c in classes:
            (root/split/c).mkdir(parents=True)
            for i in range(n):
                pixels = torch.randint(256, (24, 30, 3), generator=rng, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(root/split/c/f'{i}.png')
    return root


def same(a, b): return all(torch.equal(x, y) for pair in zip(a, b, strict=True) for x, y in zip(*pair, strict=True))


@pytest.mark.parametrize('large', [False, True])
def test_batches_repeat_with_any_number_of_workers(tmp_path, monkeypatch, large):
    "In memory or from files, in this process or in two: the same pixels, and another seed gives others."
    if large:
        monkeypatch.setattr('greedynasv2.data.IN_MEMORY_BYTES', 0)
    data = load_data(make_folder(tmp_path), image_size=16)
    assert data.train.in_memory != large and len(data.test) == 24
    one = list(data.batches(4, epoch=1))
    assert same(one, data.batches(4, epoch=1)) and same(one, data.batches(4, epoch=1, n_workers=2))
    assert same(one[2:], data.batches(4, epoch=1, start=2))
    assert not same(one, data.batches(4, epoch=2))
    assert not same(one, load_data(tmp_path, image_size=16, seed=1).batches(4, epoch=1))
    x, y = data.tensors('valid')
    assert x.shape == (2, 3, 16, 16) and x.is_contiguous(memory_format=torch.channels_last)


def test_crops_are_cut_out_of_the_whole_photograph(tmp_path, monkeypatch):
    "Of a broad image read from a file, its ends are seen too, which a cut from the middle would have lost."
    monkeypatch.setattr('greedynasv2.data.IN_MEMORY_BYTES', 0)
    for c in 'ab':
        (tmp_path/c).mkdir()
        for i in range(20):
            image = Image.new('RGB', (90, 30))
            for x in (0, 60):
                image.paste((255, 255, 255), (x, 0, x + 30, 30))      # black in the middle third
            image.save(tmp_path/c/f'{i}.png')
    data = load_data(tmp_path, image_size=16)
    assert data.augment == 'crop_flip'
    crops, middle = (torch.cat([x for x, _ in data.batches(4, augment=a)]) for a in ('crop_flip', 'none'))
    assert middle.mean(1).max() < 0 < (crops.mean((1, 2, 3)) > 1).sum()


def test_batches_leave_the_global_generator_alone():
    "Augmenting an image moves no other random number."
    data = load_data('digits', image_size=16)
    torch.manual_seed(0)
    a = torch.rand(3)
    torch.manual_seed(0)
    batches = data.batches(32)
    next(batches)
    b = torch.rand(3)
    assert torch.equal(a, b)


def test_splits_are_disjoint_and_follow_the_seed():
    "Train and validation share no image, cover the set, and move with the seed; the test set does not move."
    a, b = load_data('digits', 16, seed=0), load_data('digits', 16, seed=1)
    def whole(d): return torch.cat([d.train.images, d.valid.images]).flatten(1)
    assert len(a.train) + len(a.valid) + len(a.test) == 1797
    assert torch.equal(whole(a).long().sum(0), whole(b).long().sum(0))
    assert not torch.equal(a.valid.images, b.valid.images)
    assert torch.equal(a.test.images, b.test.images)
    assert len(load_data('digits', 16, n_train=100).train) == 100


def test_an_epoch_sees_every_image_once():
    "Labels of an epoch are those of the training set."
    data = load_data('digits', 16, n_valid=97)
    seen = torch.cat([y for _, y in data.batches(100)])
    assert torch.equal(seen.bincount(), data.train.labels.bincount())


def test_bad_folders(tmp_path):
    "Missing, empty, one class, an empty class, other classes in val, an unreadable file: each is named."
    with pytest.raises(InputError, match='There is no folder'):
        load_data(tmp_path/'nowhere')
    (tmp_path/'empty').mkdir()
    with pytest.raises(InputError, match='empty holds no images'):
        load_data(tmp_path/'empty')
    one = make_folder(tmp_path/'one', classes=('cat',))
    with pytest.raises(InputError, match="one class only, 'cat'"):
        load_data(one)
    folder = make_folder(tmp_path/'two')
    (folder/'val'/'cat').rename(folder/'val'/'cow')
    with pytest.raises(InputError, match='different classes; only in one of them: cat, cow'):
        load_data(folder)
    (folder/'val'/'cow').rename(folder/'val'/'cat')
    (folder/'train'/'emu').mkdir()
    with pytest.raises(InputError, match='emu holds no images'):
        load_data(folder)
    (folder/'train'/'emu').rmdir()
    (folder/'train'/'dog'/'3.png').write_bytes((folder/'train'/'dog'/'3.png').read_bytes()[:60])
    with pytest.raises(InputError, match='dog/3.png cannot be read'):
        load_data(folder)
    with pytest.raises(InputError, match='A batch of 9999 images'):
        next(load_data('digits').batches(9999))


def test_photographs_are_scaled_before_they_are_shifted(tmp_path, monkeypatch):
    "From files or from memory, shift_flip gives the same pixels: the whole image, not a corner at full resolution."
    folder = make_folder(tmp_path)
    small = load_data(folder, image_size=16)
    monkeypatch.setattr('greedynasv2.data.IN_MEMORY_BYTES', 0)
    large = load_data(folder, image_size=16)
    assert (small.augment, large.augment) == ('shift_flip', 'crop_flip')
    large.mean, large.std = small.mean, small.std
    assert same(small.batches(4), large.batches(4, augment='shift_flip'))


def test_all_kinds_of_files(tmp_path):
    "Upper-case endings and every mode are read; hidden files are not."
    for c in 'ab':
        (tmp_path/c).mkdir()
    for i, mode in enumerate(['L', 'LA', 'P', 'RGBA', 'I;16', '1']):
        Image.new(mode, (9, 9)).save(tmp_path/'a'/f'{i}.PNG')
    Image.new('CMYK', (1, 9)).save(tmp_path/'b'/'c.JPEG')
    (tmp_path/'b'/'._c.jpg').write_text('no image')
    (tmp_path/'a'/'.ipynb_checkpoints').mkdir()
    Image.new('RGB', (9, 9)).save(tmp_path/'a'/'.ipynb_checkpoints'/'L1.png')
    data = load_data(tmp_path, image_size=8)
    assert len(data.train) + len(data.valid) == 7


@pytest.mark.slow
def test_cifar10(data_file):
    "All of CIFAR-10: counts, classes, pixels at 32 px and at another size."
    data_file('cifar10_imagefolder.tar.gz')
    data = load_data('cifar10', image_size=32)
    assert (len(data.train), len(data.valid), len(data.test)) == (45_000, 5_000, 10_000)
    assert data.classes[:2] == ['airplane', 'automobile'] and data.test.labels.bincount().tolist() == [1000]*10
    assert all(abs(m - e) < .01 for m, e in zip(data.mean, (.491, .482, .447), strict=True))
    assert load_data('cifar10', image_size=24, n_train=50).train.images.shape == (50, 3, 24, 24)
