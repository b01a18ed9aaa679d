"""`timm-gated prepare-cifar10` on small synthetic sources, in the official layout and as PNG sheets"""
import hashlib
import json
import os
import pickle
import random
import re
import tarfile

import numpy as np
import pytest
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from tool import load_tool
from torchvision.datasets import CIFAR10

COUNT = 6  # images per batch file
TOTALS = {'train': 5 * COUNT, 'validation': COUNT}


@pytest.fixture(scope='module')
def tool():
    return load_tool('prepare_cifar10')


@pytest.fixture
def data():
    """Images and labels of each split."""
    rng = np.random.default_rng(0)
    return {
        split: (rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, n).tolist())
        for split, n in TOTALS.items()}


def batches(data):
    """Name, images and labels of each batch file."""
    for split, names in (('train', [f'data_batch_{i}' for i in range(1, 6)]), ('validation', ['test_batch'])):
        images, labels = data[split]
        for i, name in enumerate(names):
            part = slice(i * COUNT, (i + 1) * COUNT)
            yield name, images[part], labels[part]


def write_checked(path, content) -> str:
    """Write a pickle; returns its MD5 sum."""
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def official(data, tmp_path, monkeypatch):
    """Folder of official batches, whose MD5 sums torchvision expects."""
    folder = tmp_path / 'source' / 'cifar-10-batches-py'
    folder.mkdir(parents=True)
    sums = [
        [name, write_checked(folder / name, {
            'data': images.transpose(0, 3, 1, 2).reshape(len(images), -1), 'labels': labels})]
        for name, images, labels in batches(data)]
    meta = write_checked(folder / 'batches.meta', {'label_names': ['any']})
    monkeypatch.setattr(CIFAR10, 'train_list', sums[:5])
    monkeypatch.setattr(CIFAR10, 'test_list', sums[5:])
    monkeypatch.setattr(CIFAR10, 'meta', {**CIFAR10.meta, 'md5': meta})
    return folder


@pytest.fixture
def sheets(data, tmp_path):
    """Folder of the npm package."""
    folder = tmp_path / 'source' / 'package'
    folder.mkdir(parents=True)
    for name, images, _ in batches(data):
        Image.fromarray(images.reshape(len(images), 1024, 3)).save(folder / f'{name}.png')
    for split, name in (('train', 'train_lables.json'), ('validation', 'test_lables.json')):
        (folder / name).write_text(json.dumps(data[split][1]))
    return folder


def check_images(tool, folder, images, labels, pad):
    assert sorted(path.name for path in folder.iterdir()) == list(tool.CLASSES)
    assert len(list(folder.glob('*/*'))) == len(images)
    for i, (expected, label) in enumerate(zip(images, labels, strict=True)):
        with Image.open(folder / tool.CLASSES[label] / f'{i:05d}.png') as image:
            assert image.mode == 'RGB'
            np.testing.assert_array_equal(np.asarray(image), np.pad(expected, ((pad, pad), (pad, pad), (0, 0))))


@pytest.mark.parametrize('form', ['folder', 'parent', 'archive'])
@pytest.mark.parametrize('layout', ['official', 'sheets'])
def test_every_source(tool, layout, form, data, tmp_path, request):
    source = request.getfixturevalue(layout)
    if form == 'parent':
        source = source.parent
    if form == 'archive':
        with tarfile.open(tmp_path / 'source.tar.gz', 'w:gz') as archive:
            archive.add(source, source.name)
        source = tmp_path / 'source.tar.gz'
    output = tmp_path / 'new' / 'cifar10'
    assert tool.prepare(source, output) == TOTALS
    check_images(tool, output / 'train', *data['train'], pad=4)
    check_images(tool, output / 'validation', *data['validation'], pad=0)
    assert [path.name for path in output.parent.iterdir()] == ['cifar10']


def test_classes_sort_into_label_order(tool):
    assert list(tool.CLASSES) == sorted(tool.CLASSES)
    assert tool.CLASSES[0] == 'airplane' and tool.CLASSES[6] == 'frog' and tool.CLASSES[9] == 'truck'


def test_options(tool, sheets, data, tmp_path, capsys):
    output = tmp_path / 'my data'
    assert tool.main(['--source', str(sheets), '--output', str(output), '--pad', '0', '--limit', '8']) == 0
    images, labels = data['train']
    check_images(tool, output / 'train', images[:8], labels[:8], pad=0)
    printed = capsys.readouterr()
    assert 'Wrote 8 training images (32x32) and 6 validation images (32x32)' in printed.out
    assert '--scale 1 1' in printed.out and printed.out.endswith(f"--data-dir '{output}'\n")
    assert 'train: 100%' in printed.err
    for bad in (['--pad', '-1'], ['--limit', '0']):
        with pytest.raises(SystemExit, match='2'):
            tool.main(['--source', str(sheets), '--output', str(tmp_path / 'out'), *bad])


@pytest.mark.parametrize('pad', [2, 4])
def test_timm_crop_is_exact(tool, pad):
    """timm's random crop takes 32x32 windows from the padded image at every offset, without resizing."""
    side = 32 + 2 * pad
    rows, columns = np.mgrid[:side, :side].astype(np.uint8)
    padded = np.stack([rows, columns, rows ^ columns], axis=-1)
    scale = tool.crop_scale(pad)
    assert scale == pytest.approx(0.64) or pad != 4
    crop = RandomResizedCropAndInterpolation(32, scale=(scale, scale), ratio=(1., 1.), interpolation='bilinear')
    random.seed(0)
    offsets = set()
    for _ in range(600):
        window = np.asarray(crop(Image.fromarray(padded)))
        y, x = int(window[0, 0, 0]), int(window[0, 0, 1])
        np.testing.assert_array_equal(window, padded[y:y + 32, x:x + 32])
        offsets.add((y, x))
    assert len(offsets) == (2 * pad + 1) ** 2


def test_a_changed_batch_is_not_unpickled(tool, official, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'pwned'),)

    (official / 'data_batch_3').write_bytes(pickle.dumps(Evil()))
    assert tool.main(['--source', str(official), '--output', str(tmp_path / 'out')]) == 2
    assert 'MD5 sum is wrong' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['source']


@pytest.mark.parametrize('name, content, message', [
    ('test_batch.png', b'text', 'cannot identify image file'),
    ('data_batch_2.png', None, 'No such file.*data_batch_2.png'),
    ('test_lables.json', b'[1, 2]', 'cannot reshape'),
    ('test_lables.json', b'[1, 2', 'JSONDecodeError'),
    ('test_lables.json', b'[0, 1, 2, 3, 4, 10]', 'from 0 to 9, got .*10'),
    ('test_lables.json', b'[0, 1, 2, 3, 4, -1]', 'from 0 to 9, got .*-1'),
    ('train_lables.json', b'["5"]', "from 0 to 9, got .*'5'"),
])
def test_bad_sheets(tool, sheets, name, content, message, tmp_path, capsys):
    (sheets / name).unlink()
    if content is not None:
        (sheets / name).write_bytes(content)
    assert tool.main(['--source', str(sheets), '--output', str(tmp_path / 'out')]) == 2
    assert re.search(f'error: {sheets} cannot be read as CIFAR-10: .*{message}', capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ['source']


def test_other_sources(tool, tmp_path, capsys):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'text').write_text('hello')
    for name, message in (('no', 'No such file'), ('empty', 'is missing'), ('text', 'ReadError')):
        assert tool.main(['--source', str(tmp_path / name), '--output', str(tmp_path / 'out')]) == 2
        error = capsys.readouterr().err
        assert re.search(f'error: .*/{name} cannot be read as CIFAR-10: .*{message}', error.replace('\n', ' ')), error
        assert not (tmp_path / 'out').exists()


def test_an_interruption_leaves_nothing(tool, sheets, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(tool.np, 'pad', interrupted)
    with pytest.raises(KeyboardInterrupt):
        tool.prepare(sheets, tmp_path / 'out')
    assert [path.name for path in tmp_path.iterdir()] == ['source']


def test_an_existing_output_is_kept(tool, sheets, tmp_path):
    (tmp_path / 'out').mkdir()
    tool.prepare(sheets, tmp_path / 'out', limit=1)  # an empty folder is fine
    before = sorted((tmp_path / 'out').rglob('*'))
    with pytest.raises(ValueError, match='exists already'):
        tool.prepare(sheets, tmp_path / 'out')
    assert sorted((tmp_path / 'out').rglob('*')) == before
