"""Wrappers and modes of models"""
from contextlib import contextmanager
from typing import Iterator

import torch
import torch.nn as nn
from timm.utils import unwrap_model

__all__ = ['evaluation_mode', 'unwrap']


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside its DDP or `torch.compile` wrapper."""
    wrapped = isinstance(model, (nn.parallel.DistributedDataParallel, torch._dynamo.OptimizedModule))
    return unwrap_model(model) if wrapped else model


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode. The mode of every module is restored at the end."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
