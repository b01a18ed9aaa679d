"""Models and data of the tools, created by timm's factories from the options of timm's scripts

Without a checkpoint, the pretrained weights of the model's tag are loaded, as in timm's `validate.py`. Random weights
are an error unless the user asks for them (`--untrained`); the output then says so, see `title`.
"""
import argparse
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
import timm
import torch
import torch.nn as nn
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import get_pretrained_cfg, is_model_pretrained, load_checkpoint

from ..models import check_model_name, check_weights, near_models
from ..utils import explained
from .record import Outcome, classification_step

__all__ = [
    'Data', 'FetchImage', 'create_data', 'create_network', 'find_device', 'note_untrained', 'parse_checkpoint', 'title',
]

FetchImage = Callable[[int], np.ndarray]  # from the index of an input to uint8 [H, W, 3]

# Folder names of splits in timm; the names of a group are synonyms
_SPLITS = (('train', 'training'), ('val', 'valid', 'validation', 'eval', 'evaluation'), ('test',))


def parse_checkpoint(text: str, model: str) -> Tuple[str, str]:
    """Split a checkpoint argument, FILE or MODEL=FILE, into model and file.

    Args:
        text: Checkpoint argument.
        model: Default model.
    """
    name, separator, path = text.partition('=')
    if separator and timm.is_model(name):
        return name, path
    if separator and os.path.isfile(path) and not os.path.isfile(text):
        raise ValueError(f"timm has no model '{name}' (of '{text}'); near: {', '.join(near_models(name)) or 'none'}.")
    if not model:
        raise ValueError(f"the model of '{text}' is unknown. Give --model, or write the checkpoint as MODEL=FILE.")
    return model, text


def find_device(name: str = '') -> str:
    """Return the device name; by default the GPU, if there is one."""
    return name or ('cuda' if torch.cuda.is_available() else 'cpu')


def create_network(model: str, checkpoint: str, args: argparse.Namespace) -> nn.Module:
    """Create a timm model and load its weights. Only tensors are read from a checkpoint.

    Args:
        model: Name of the model.
        checkpoint: Path of the weights; empty for the pretrained ones.
        args: Model options of the tools. Without `untrained`, random weights are an error.
    """
    allowed = getattr(args, 'untrained', False)
    remedy = 'Give --checkpoint FILE' + (', or --untrained.' if hasattr(args, 'untrained') else '.')
    pretrained = args.pretrained or not (checkpoint or allowed)
    options = {'num_classes': args.num_classes, 'in_chans': args.in_chans}
    hint = ''
    try:
        check_model_name(model)
        if pretrained:
            check_weights(model, remedy)
            hint = f' Without a checkpoint, pretrained weights are loaded. {remedy}'
        given = {name: value for name, value in options.items() if value is not None}
        network: Any = timm.create_model(model, pretrained=pretrained, **given, **args.model_kwargs)
    except (RuntimeError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"the model '{model}' cannot be made: {error}{hint}") from error
    if checkpoint:
        if not os.path.isfile(checkpoint):
            raise ValueError(f'no checkpoint at {checkpoint}.')
        with explained(f"the checkpoint {checkpoint} does not load into '{model}'"):
            load_checkpoint(network, checkpoint, use_ema=args.use_ema, weights_only=True)
    loaded = bool(checkpoint or pretrained)
    other_head = not checkpoint and network.num_classes not in (0, network.pretrained_cfg['num_classes'])
    note_untrained(network, loaded, ('head',) if other_head else (), allowed, remedy)
    return network.to(find_device(args.device)).eval()


def note_untrained(
        network: nn.Module,
        loaded: bool,
        parts: Sequence[str] = (),
        allowed: bool = False,
        remedy: str = '',
) -> None:
    """Set `network.untrained`, which says what has random weights. Raise a ValueError unless that is allowed.

    Args:
        network: Network to check.
        loaded: Whether weights were loaded.
        parts: Parts without loaded weights, except gates, which are found in the network.
        allowed: Whether random weights are allowed.
        remedy: Advice for the error message.
    """
    if any(getattr(module, 'fresh_gates', ()) for module in network.modules()):
        parts = ('gates', *parts)
    random = ' and '.join(parts) if loaded else 'network'
    if random and not allowed:
        raise ValueError(f'no weights for the {random}, which would be untrained. {remedy}')
    network.untrained = f'untrained {random}' if random else ''  # type: ignore[assignment]


def title(network: nn.Module, model: str, name: str = '') -> str:
    """Name of a network in tables and reports, with its pretrained tag and its untrained parts.

    Args:
        network: Network from `create_network`.
        model: Name of the model.
        name: Name to use instead of the model and tag.
    """
    if not name:
        cfg = get_pretrained_cfg(model) if is_model_pretrained(model) and not network.untrained else None
        name = f'{cfg.architecture}.{cfg.tag}' if cfg and cfg.tag else model
    return f'{name} ({network.untrained})' if network.untrained else name


@dataclass
class Data:
    """Data set and evaluation step of a model.

    Attributes:
        loader: Batches in the order of the data set.
        class_names: Names of the classes.
        fetch_image: Function that returns an image, resized and cropped for the model, by index.
        step: Function that runs the model on a batch and returns the outcome.
    """
    loader: Any
    class_names: List[str]
    fetch_image: FetchImage
    step: Callable[[Any], Outcome]


def create_data(network: nn.Module, args: argparse.Namespace) -> Data:
    """Create the data set and its loader, with the input size and normalisation of the model.

    Args:
        network: Classifier.
        args: Data options of the tools.
    """
    if args.class_map and not args.class_map.endswith('.txt'):
        raise ValueError(f'--class-map must be a text file (.txt) with one class per line, got {args.class_map}.')
    if not args.dataset:
        _check_folder(args.data_dir, args.split)
    config = resolve_data_config(vars(args), model=network)
    channels = config['input_size'][0]
    try:
        dataset = create_dataset(
            args.dataset, root=args.data_dir, split=args.split, class_map=args.class_map,
            input_img_mode='L' if channels == 1 else 'RGB')
    except (RuntimeError, AssertionError, OSError) as error:
        raise ValueError(f'no data in {args.data_dir}, split {args.split}: {error}') from error
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(f"the data set '{args.dataset}' cannot be indexed; use an image folder.")
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


def _check_folder(folder: Optional[str], split: str) -> None:
    """Raise a ValueError if the image folder or its split does not exist."""
    if not folder or not Path(folder).is_dir():
        exists = folder and Path(folder).exists()
        made = '' if not folder or exists else (
            f'; it does not exist. `timm-gated prepare-cifar10 --source cifar-10-python.tar.gz --output {folder}` '
            f'creates it for CIFAR-10')
        raise ValueError(f'--data-dir must be a folder of images, got {folder}{made}.')
    folders = {path.name for path in Path(folder).iterdir() if path.is_dir()}
    same = next((names for names in _SPLITS if split in names), (split,))
    others = sorted(folders.intersection(itertools.chain(*_SPLITS)))
    if others and not folders.intersection(same):  # timm would read them as classes
        raise ValueError(f"{folder} has no split '{split}'; it has {', '.join(others)}.")


def _class_names(dataset: Any, num_outputs: int) -> List[str]:
    indices = getattr(getattr(dataset, 'reader', dataset), 'class_to_idx', None)
    if not indices:
        return [str(index) for index in range(num_outputs)]
    if len(indices) != num_outputs:
        raise ValueError(
            f'the data has {len(indices)} classes ({", ".join(list(indices)[:5])} …), but the model has {num_outputs} '
            f'outputs. Labels follow the order of the folders, so they would not match the training. List all classes '
            f'in a file for --class-map, or give --num-classes.')
    return sorted(indices, key=indices.__getitem__)
