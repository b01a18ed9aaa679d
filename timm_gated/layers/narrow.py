"""Residual blocks with individual widths of their inner maps

Filters of an inner map can be removed, since nothing outside the block reads them: the convolution that computes the
map, its norm, its gate and the convolution that reads it all become smaller. Two model options describe such blocks, so
that a config can hold them:

    inner_channels: width of each inner map, by block name: {'layer1.0': [9], 'layer1.1': [16]}
    gated_channels: number of these channels that have gates; they come first, and the others are always open
"""
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _NormBase
from torchvision.ops import FrozenBatchNorm2d

from .gate import ChannelGate

__all__ = ['Channels', 'check_map', 'gated_channels', 'inner_channels', 'narrow_map', 'narrow_maps']

Channels = Mapping[str, Sequence[int]]  # one number per inner map, by block name


def residual_blocks(model: nn.Module) -> Iterator[Tuple[str, Any]]:
    """Residual blocks of a timm or mmseg ResNet, with their names."""
    for name, module in model.named_modules():
        if hasattr(module, 'conv2') and hasattr(module, 'downsample'):
            yield name, module


def inner_channels(model: nn.Module) -> Dict[str, List[int]]:
    """Width of each inner map of each residual block."""
    return {
        name: [getattr(block, f'conv{index}').out_channels for index in _maps(block)]
        for name, block in residual_blocks(model)}


def gated_channels(model: nn.Module) -> Dict[str, List[int]]:
    """Number of gated channels of each inner map of each residual block."""
    return {
        name: [0 if (gate := _gate(block, index)) is None else gate.num_gates for index in _maps(block)]
        for name, block in residual_blocks(model)}


def narrow_maps(model: nn.Module, inner: Optional[Channels] = None, gated: Optional[Channels] = None) -> None:
    """Narrow inner maps of a model to their first channels, in place.

    Args:
        model: A ResNet, gated or not.
        inner: Widths of the inner maps by block name; other blocks are unchanged.
        gated: Number of gated channels by block name; by default all that have a gate now.
    """
    inner, gated = inner or {}, gated or {}
    for name, given in (('inner_channels', inner), ('gated_channels', gated)):
        if not isinstance(given, Mapping):
            raise ValueError(f'{name} must be a mapping from block names to lists, got {given!r}.')
    blocks = dict(residual_blocks(model))
    widths, gates = inner_channels(model), gated_channels(model)
    for name in dict.fromkeys((*inner, *gated)):
        if name not in blocks:
            raise ValueError(f"the model has no residual block '{name}'; its blocks: {', '.join(blocks)}.")
        new_widths = _check(inner.get(name, widths[name]), widths[name], f'inner_channels of {name}', minimum=1)
        most = [min(pair) for pair in zip(gates[name], new_widths, strict=True)]
        new_gates = _check(gated.get(name, most), most, f'gated_channels of {name}', minimum=0)
        for index, width, num_gates in zip(_maps(blocks[name]), new_widths, new_gates, strict=True):
            narrow_map(blocks[name], index, torch.arange(width), num_gates)


def narrow_map(block: Any, index: int, keep: torch.Tensor, num_gates: int = 0) -> None:
    """Keep some channels of an inner map of a residual block, in place.

    Args:
        block: A residual block of plain convolutions and batch norms.
        index: Index of the map; 1 is the output of conv1.
        keep: Channels to keep, in their new order. If empty, one channel with zero weights remains, since a
            convolution needs at least one.
        num_gates: Number of kept channels that keep their gates, the first ones; the others become always open.
    """
    check_map(block, index)
    conv, norm, reader = (getattr(block, name) for name in (f'conv{index}', f'bn{index}', f'conv{index + 1}'))
    gate = _gate(block, index)
    if not len(keep):
        with torch.no_grad():
            reader.weight[:, 0] = 0
        keep = torch.zeros(1, dtype=torch.long)
    keep = keep.to(conv.weight.device)
    _take(conv, ('weight', 'bias'), keep)
    _take(norm, ('weight', 'bias', 'running_mean', 'running_var'), keep)
    _take(reader, ('weight',), keep, dim=1)
    conv.out_channels = reader.in_channels = len(keep)
    if isinstance(norm, _NormBase):
        norm.num_features = len(keep)
    if gate is not None and num_gates:
        _take(gate.fc2, ('weight', 'bias'), keep[:num_gates])
        gate.fc2.out_features = num_gates
        gate.num_ungated = len(keep) - num_gates
    elif gate is not None:
        setattr(block, f'gate{index}', None)


def _maps(block: Any) -> range:
    return range(1, 3 if hasattr(block, 'conv3') else 2)


def _gate(block: Any, index: int) -> Optional[ChannelGate]:
    return getattr(block, f'gate{index}', None)


def _check(values: Any, limits: Sequence[int], name: str, minimum: int) -> Sequence[int]:
    valid = isinstance(values, Sequence) and len(values) == len(limits) and all(type(value) is int for value in values)
    if not valid or not all(minimum <= value <= limit for value, limit in zip(values, limits, strict=True)):
        ranges = ', '.join(f'{minimum} to {limit}' for limit in limits)
        raise ValueError(f'{name} must be {len(limits)} whole number(s) within {ranges}; got {values!r}.')
    return values


def check_map(block: Any, index: int) -> None:
    """Raise a ValueError if an inner map of a residual block cannot be narrowed.

    Args:
        block: The residual block.
        index: Index of the map; 1 is the output of conv1.
    """
    names = (f'conv{index}', f'bn{index}', f'conv{index + 1}')
    conv, norm, reader = (getattr(block, name, None) for name in names)
    gate: Optional[nn.Module] = _gate(block, index)
    plain = all(type(module) is nn.Conv2d and module.groups == 1 for module in (conv, reader))
    if not plain or not isinstance(norm, (_NormBase, FrozenBatchNorm2d)):
        raise ValueError(
            f'only plain convolutions with batch norms can be narrowed, this {type(block).__name__} has '
            f'{conv}, {norm} and {reader}.')
    if gate is not None and not isinstance(gate, ChannelGate):
        raise ValueError(f'only maps under a ChannelGate can be narrowed, got a map under a {type(gate).__name__}.')
    if getattr(block, 'with_plugins', False):  # mmseg's
        raise ValueError(f'a {type(block).__name__} with plugins cannot be narrowed.')
    if getattr(block, 'gate_before_act', False) and float(getattr(block, f'act{index}')(torch.zeros(()))) != 0:
        raise ValueError(
            f'a channel that is closed before {getattr(block, f"act{index}")} is not zero after it, so it cannot be '
            f'removed.')
    between = getattr(block, 'aa', None)
    if between is not None and not isinstance(between, nn.Identity):
        raise ValueError(f'a block with {type(between).__name__} between its convolutions cannot be narrowed.')


def _take(module: nn.Module, names: Sequence[str], keep: torch.Tensor, dim: int = 0) -> None:
    """Select channels of parameters and buffers that are not None."""
    for name in names:
        tensor = getattr(module, name)
        if tensor is None:
            continue
        selected = tensor.detach().index_select(dim, keep)
        if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
            selected = selected.to(memory_format=torch.channels_last)
        if isinstance(tensor, nn.Parameter):
            selected = nn.Parameter(selected, requires_grad=tensor.requires_grad)
        setattr(module, name, selected)
