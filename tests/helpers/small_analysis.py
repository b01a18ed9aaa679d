"""Tiny gated classifier and data for the tests of analysis and tools"""
from pathlib import Path
from typing import List, Tuple

import numpy as np
import timm
import torch
import torch.nn as nn
from nets import shuffle
from PIL import Image

import timm_gated  # noqa: F401
from timm_gated.analysis import GateRecord, record_gates
from timm_gated.analysis.record import classification_step

CLASSES = ['ant', 'bee', 'cow', 'dog', 'eel', 'fox', 'gnu']
MODEL_KWARGS = dict(layers=(1, 1, 1), channels=(8, 8, 8), num_classes=len(CLASSES))
MODEL_OPTIONS = ['--model-kwargs', 'layers=(1,1,1)', 'channels=(8,8,8)', '--num-classes', '7']  # the same for tools


def make_net(name: str = 'gated_resnet20', **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **{**MODEL_KWARGS, **kwargs})).eval()


def make_batches(num_batches: int = 4, size: int = 16, classes: int = len(CLASSES), seed: int = 0) -> List[Tuple]:
    """Batches of images whose brightness and contrast depend on the class."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        labels = torch.randint(classes, (size,), generator=generator)
        images = torch.randn(size, 3, 8, 8, generator=generator) * (1 + labels[:, None, None, None] % 3)
        batches.append((images + (labels[:, None, None, None] - 3) / 2, labels))
    return batches


def make_record(net: nn.Module, batches: List[Tuple], num_examples: int = 8) -> GateRecord:
    return record_gates(net, batches, CLASSES, classification_step(net, len(CLASSES)), num_examples)


def fetch_image(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def write_images(folder: Path, classes: List[str], per_class: int = 6) -> Path:
    """Write an image folder in timm's layout."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(classes):
        target = folder / 'validation' / name
        target.mkdir(parents=True)
        for index in range(per_class):
            pixels = rng.integers(0, min(40 + 30 * number, 256), (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(target / f'{index}.png')
    return folder
