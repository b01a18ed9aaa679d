"""Residual blocks with individual widths of their inner maps

Filters of an inner map can be removed, since nothing outside the block reads them: the convolution that computes the
map, its norm, its gate and the convolution that reads it all become smaller. Two model options describe such blocks, so
that a config can hold them:

    inner_channels: width of each inner map, by block name: {'layer1.0': [9], 'layer1.1': [16]}
    gated_channels: number of these channels that have gates; they come first, and the others are always open

All groups of a grouped convolution keep equally many channels. Its maps keep their order, so either all of their
channels have gates or none.
"""
import math
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.layers import BlurPool2d
from torch.nn.modules.batchnorm import _NormBase
from torchvision.ops import FrozenBatchNorm2d

from .gate import ChannelGate

__all__ = [
    'Channels', 'check_map', 'gated_channels', 'inner_channels', 'map_groups', 'narrow_map', 'narrow_maps',
]

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
        for index, old, width, num_gates in zip(
                _maps(blocks[name]), widths[name], new_widths, new_gates, strict=True):
            groups = map_groups(blocks[name], index)
            if width % groups:
                raise ValueError(
                    f'inner_channels of {name} must be multiples of {groups}, the number of groups of a convolution; '
                    f'got {width}.')
            if groups > 1 and num_gates not in (0, width):
                raise ValueError(
                    f'gated_channels of {name} must be 0 or {width}, since the channels of a grouped convolution keep '
                    f'their order; got {num_gates}.')
            keep = torch.arange(old).view(groups, -1)[:, :width // groups].flatten()
            narrow_map(blocks[name], index, keep, num_gates)


def map_groups(block: Any, index: int) -> int:
    """Number of parts of an inner map that must keep equally many channels, 1 unless a convolution is grouped.

    Args:
        block: The residual block.
        index: Index of the map; 1 is the output of conv1.
    """
    return math.lcm(*(getattr(block, f'conv{index + side}').groups for side in (0, 1)))


def narrow_map(
        block: Any,
        index: int,
        keep: torch.Tensor,
        num_gates: int = 0,
        closed: Optional[torch.Tensor] = None,
) -> None:
    """Keep some channels of an inner map of a residual block, in place.

    Args:
        block: A residual block of convolutions and batch norms.
        index: Index of the map; 1 is the output of conv1.
        keep: Channels to keep, in their new order, at least one. Equally many of each group, if there are groups.
        num_gates: Number of kept channels that keep their gates, the first ones; the others become always open.
        closed: Kept channels whose values are ignored, boolean: they only fill their group.
    """
    check_map(block, index)
    conv, norm, reader = (getattr(block, name) for name in (f'conv{index}', f'bn{index}', f'conv{index + 1}'))
    gate = _gate(block, index)
    keep = keep.to(conv.weight.device)
    _take(conv, ('weight', 'bias'), keep)
    _take(norm, ('weight', 'bias', 'running_mean', 'running_var'), keep)
    _take_inputs(reader, keep, closed)
    conv.out_channels = reader.in_channels = len(keep)
    if isinstance(norm, _NormBase):
        norm.num_features = len(keep)
    between = getattr(block, 'aa', None) if index == _maps(block)[-1] else None
    if isinstance(between, BlurPool2d):
        _take(between, ('filt',), keep)
        between.channels = len(keep)
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
    plain = all(type(module) is nn.Conv2d for module in (conv, reader))
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
    if between is not None and not isinstance(between, (nn.Identity, nn.AvgPool2d, BlurPool2d)):
        raise ValueError(f'a block with {type(between).__name__} between its convolutions cannot be narrowed.')


def _take(module: nn.Module, names: Sequence[str], keep: torch.Tensor) -> None:
    """Select channels of parameters and buffers that are not None."""
    for name in names:
        tensor = getattr(module, name)
        if tensor is not None:
            _replace(module, name, tensor.detach().index_select(0, keep))


def _take_inputs(conv: nn.Conv2d, keep: torch.Tensor, closed: Optional[torch.Tensor]) -> None:
    """Select inputs of a convolution, equally many of each group, and ignore the closed ones of them."""
    def by_filter(values: torch.Tensor) -> torch.Tensor:  # [filters, inputs of a group]
        return values.to(keep.device).view(conv.groups, -1).repeat_interleave(conv.out_channels // conv.groups, 0)

    inputs = by_filter(keep % (conv.in_channels // conv.groups))
    weight = conv.weight.detach().gather(1, inputs[:, :, None, None].expand(-1, -1, *conv.weight.shape[2:]))
    if closed is not None:
        weight[by_filter(closed)] = 0
    _replace(conv, 'weight', weight)


def _replace(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a tensor of a module; the memory format and the kind of tensor are kept."""
    old = getattr(module, name)
    if old.ndim == 4 and old.is_contiguous(memory_format=torch.channels_last) and not old.is_contiguous():
        value = value.to(memory_format=torch.channels_last)
    setattr(module, name, nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value)
