"""Multiply-accumulates, of the dense network and of each sample

The convention, as in the gating paper:
    * Counted are convolutions and linear layers, one MAC a multiplication; not counted are normalisation, activation,
      pooling, residual additions and biases. For a plain ResNet the total agrees with fvcore's convolution + linear.
    * `dense` is the plain network without its gates.
    * `per_sample` is what an image costs: a convolution counts its open inputs times its open outputs; shortcuts, stem
      and head count in full; and so does the overhead of the gates: their linear layers, and the additions of the
      pooling that they share, one a value.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
import math
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, Set, Tuple

import torch
import torch.nn as nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .gate import ChannelGate

__all__ = ['Macs', 'ModuleMacs', 'count_macs']


@dataclass
class ModuleMacs:
    """MACs of one module.

    Attributes:
        dense: MACs of a sample in the plain network; 0 for gates and their pooling.
        per_sample: MACs of each sample, [N], int64.
    """
    dense: int
    per_sample: torch.Tensor


@dataclass
class Macs:
    """MACs of a batch.

    Attributes:
        dense: MACs of a sample in the plain network without gates.
        per_sample: MACs of each sample, gates included, [N], int64.
        by_module: Both, for every module that counts, by name.
    """
    dense: int
    per_sample: torch.Tensor
    by_module: Dict[str, ModuleMacs] = field(repr=False)

    @property
    def share(self) -> float:
        """Mean MACs of a sample, gates included, over those of the plain network."""
        return self.per_sample.double().mean().item() / self.dense


@torch.no_grad()
def count_macs(model: nn.Module, x: torch.Tensor) -> Macs:
    """Count the MACs of a forward pass in evaluation mode.

    The model's mode is restored afterwards. See the module's docstring for what counts.

    Args:
        model: A gated model, or any other model of convolutions and linear layers.
        x: A batch of images.

    Example:
        >>> macs = count_macs(model, images)
        >>> macs.dense, macs.per_sample.float().mean(), macs.share
    """
    switches: Dict[str, Tuple[Any, Any]] = {}  # gates over the inputs and over the outputs of convolutions
    overhead: Set[str] = set()  # what the plain network does not have
    for name, module in model.named_modules():
        prefix = f'{name}.' if name else ''
        if isinstance(module, ChannelGate):
            overhead.update((f'{prefix}fc1', f'{prefix}fc2'))
        elif hasattr(module, 'gated_convs'):
            overhead.add(f'{prefix}gate_pool')
            switches.update({prefix + conv: pair for conv, pair in module.gated_convs.items()})

    full: Dict[str, int] = defaultdict(int)  # MACs of a sample with all channels open

    def record(name: str, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        full[name] += _full_macs(module, args[0], output)

    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name in overhead or isinstance(module, (_ConvNd, nn.Linear)):
                stack.callback(module.register_forward_hook(partial(record, name)).remove)
        try:
            model.eval()
            model(x)
        finally:
            for module, training in modes.items():
                module.training = training

    by_module: Dict[str, ModuleMacs] = {}
    for name, macs in full.items():
        per_sample = torch.full((x.shape[0],), macs, dtype=torch.int64, device=x.device)
        for gate in switches.get(name, ()):
            if gate is not None:
                per_sample = per_sample // gate.num_gates * gate.decision.sum(1).long()
        by_module[name] = ModuleMacs(0 if name in overhead else macs, per_sample)
    return Macs(
        dense=sum(macs.dense for macs in by_module.values()),
        per_sample=sum(
            (macs.per_sample for macs in by_module.values()),
            torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)),
        by_module=by_module,
    )


def _full_macs(module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> int:
    """MACs of a sample with all channels open."""
    if isinstance(module, nn.Linear):
        return output[0].numel() * module.in_features
    if isinstance(module, _ConvTransposeNd):
        return x[0].numel() * math.prod(module.weight.shape[1:])
    if isinstance(module, _ConvNd):
        return output[0].numel() * math.prod(module.weight.shape[1:])
    return x[0].numel()  # the additions of a pooling
