"""Where the tools get models and data from: timm's factories, by the option names of timm's scripts"""
import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import timm
import torch
import torch.nn as nn
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import load_checkpoint
from timm.utils import ParseKwargs

from ..files import explained
from ..record import Outcome, classification_step
from .sample_figures import FetchImage

__all__ = ['Data', 'add_data_options', 'add_model_options', 'create_data', 'create_network', 'parse_checkpoint']


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options of timm's scripts that make a model; `--checkpoint` is each tool's own."""
    group = parser.add_argument_group('model (as in timm)')
    group.add_argument(
        '--model', metavar='NAME', help='a timm model; timm_gated.list_gated_models() lists the gated ones')
    group.add_argument('--pretrained', action='store_true', help="start from the model's pretrained weights")
    group.add_argument('--num-classes', type=int, metavar='N', help='outputs of the model (default: its own)')
    group.add_argument('--in-chans', type=int, metavar='N', help='input channels (default: 3)')
    group.add_argument(
        '--model-kwargs', nargs='*', default={}, action=ParseKwargs, metavar='KEY=VALUE',
        help='more options of the model')
    group.add_argument('--use-ema', action='store_true', help="take the checkpoint's EMA weights, if it has them")
    group.add_argument(
        '--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='where to run (default: %(default)s)')


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Options of timm's scripts that make a data set and its loader."""
    group = parser.add_argument_group('data (as in timm)')
    group.add_argument('--data-dir', metavar='DIR', help='folder of the data; SPLIT in it has a folder for each class')
    group.add_argument('--dataset', default='', metavar='NAME', help='kind of data set (default: image folder)')
    group.add_argument('--split', default='validation', help='split of the data (default: %(default)s)')
    group.add_argument(
        '--class-map', default='', metavar='FILE',
        help='text file of class names, one a line, in the order of the outputs; needed if a class has no folder')
    group.add_argument('--batch-size', '-b', type=int, default=256, metavar='N', help='default: %(default)s')
    group.add_argument('--workers', '-j', type=int, default=2, metavar='N', help='loaders (default: %(default)s)')
    group.add_argument('--img-size', type=int, metavar='N', help="size of the images (default: the model's)")
    group.add_argument(
        '--input-size', nargs=3, type=int, metavar='N', help='the same as channels, height and width')
    group.add_argument('--crop-pct', type=float, metavar='X', help="share of the image to keep (default: the model's)")
    group.add_argument('--mean', nargs='+', type=float, metavar='X', help="mean of the pixels (default: the model's)")
    group.add_argument('--std', nargs='+', type=float, metavar='X', help="their deviation (default: the model's)")
    group.add_argument('--interpolation', default='', help="of resizing (default: the model's)")


def parse_checkpoint(text: str, model: str) -> Tuple[str, str]:
    """Model and file of a checkpoint, written FILE or MODEL=FILE.

    Args:
        text: What the user wrote.
        model: The model if none is written.
    """
    name, separator, path = text.partition('=')
    if separator and timm.is_model(name):
        return name, path
    if not model:
        raise ValueError(f"of which model is '{text}'? Give --model, or write the checkpoint as MODEL=FILE.")
    return model, text


def create_network(model: str, checkpoint: str, args: argparse.Namespace) -> nn.Module:
    """Make a timm model and load its weights. Nothing but tensors is read from a checkpoint.

    Args:
        model: Name of the model.
        checkpoint: Its weights; empty for none.
        args: Options of `add_model_options`.
    """
    options = {'num_classes': args.num_classes, 'in_chans': args.in_chans}
    try:
        given = {name: value for name, value in options.items() if value is not None}
        network = timm.create_model(model, pretrained=args.pretrained, **given, **args.model_kwargs)
    except (RuntimeError, TypeError, OSError) as error:
        raise ValueError(f"the model '{model}' cannot be made: {error}. timm.list_models() lists all.") from error
    if checkpoint:
        if not os.path.isfile(checkpoint):
            raise ValueError(f'no checkpoint at {checkpoint}.')
        with explained(f"the checkpoint {checkpoint} does not load into '{model}'"):
            load_checkpoint(network, checkpoint, use_ema=args.use_ema, weights_only=True)
    return network.to(args.device).eval()


@dataclass
class Data:
    """A data set, and how a model runs over it.

    Attributes:
        loader: Yields batches in the order of the data set.
        class_names: Names of the classes.
        fetch_image: Fetches an image, as the model sees it, by its index.
        step: Runs the model on a batch and tells how it went.
    """
    loader: Any
    class_names: List[str]
    fetch_image: FetchImage
    step: Callable[[Any], Outcome]


def create_data(network: nn.Module, args: argparse.Namespace) -> Data:
    """Make the data set and its loader, at the model's input size and normalisation.

    Args:
        network: The model.
        args: Options of `add_data_options`.
    """
    if args.class_map and not args.class_map.endswith('.txt'):
        raise ValueError(f'--class-map must be a text file (.txt) with one class a line, got {args.class_map}.')
    if not args.dataset and not (args.data_dir and Path(args.data_dir).is_dir()):
        raise ValueError(f'--data-dir must be a folder of images, got {args.data_dir}.')
    config = resolve_data_config(vars(args), model=network)
    channels = config['input_size'][0]
    try:
        dataset = create_dataset(
            args.dataset, root=args.data_dir, split=args.split, class_map=args.class_map,
            input_img_mode='L' if channels == 1 else 'RGB')
    except (RuntimeError, AssertionError, OSError) as error:
        raise ValueError(f'no data in {args.data_dir}, split {args.split}: {error}') from error
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(f"the data set '{args.dataset}' has no order to look images up by; use an image folder.")
    loader = create_loader(
        dataset, config['input_size'], args.batch_size, interpolation=config['interpolation'], mean=config['mean'],
        std=config['std'], crop_pct=config['crop_pct'], crop_mode=config['crop_mode'], num_workers=args.workers,
        persistent_workers=False, use_prefetcher=False, device=torch.device('cpu'))
    mean, std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ('mean', 'std'))

    def fetch_image(index: int) -> np.ndarray:
        pixels = (dataset[index][0] * std + mean).clamp(0, 1).mul(255).round().byte()
        return pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()

    class_names = _class_names(dataset, network.num_classes)  # type: ignore[arg-type]
    return Data(loader, class_names, fetch_image, classification_step(network, len(class_names)))


def _class_names(dataset: Any, num_outputs: int) -> List[str]:
    indices = getattr(getattr(dataset, 'reader', dataset), 'class_to_idx', None)
    if not indices:
        return [str(index) for index in range(num_outputs)]
    if len(indices) != num_outputs:
        raise ValueError(
            f'the data has {len(indices)} classes ({", ".join(list(indices)[:5])} …), but the model has {num_outputs} '
            f'outputs: labels, which follow the order of the folders, would not be those of the training. List all '
            f'classes in a file for --class-map, or give --num-classes.')
    return sorted(indices, key=indices.__getitem__)
