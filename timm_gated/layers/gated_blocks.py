"""Gated residual blocks

timm's residual blocks, with gates that read the block's input and switch channels of its feature maps per image.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

By default the inner maps are gated, after the activation. The forward values are the same as before a ReLU, but closed
filters get no gradient, which the paper found necessary for stable training. The other positions of its ablation are
options. The paper does not say which maps of a bottleneck are gated; here both inner ones are, each by its own gate. A
filter of a grouped convolution (ResNeXt) reads the open inputs of its own group only.
"""
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.models.resnet import BasicBlock, Bottleneck

from .gate import ChannelGate, Gate, GatePool, apply_gate

__all__ = [
    'GatedBasicBlock', 'GatedBlock', 'GatedBottleneck', 'GatedConvs', 'MapMasks', 'add_shortcut', 'basic_branch',
    'bottleneck_branch', 'check_maps', 'decide', 'shortcut_of', 'switch',
]

# Gates over the inputs and outputs of each convolution, by name. Each decision of a gate switches an equal share of the
# channels: one filter, or all filters if the gate has a single decision. Convolutions may be grouped.
GatedConvs = Dict[str, Tuple[Optional[Gate], Optional[Gate]]]

MapMasks = Dict[int, torch.Tensor]  # masks by the index of the feature map


def check_maps(gated_maps: Any, maps: Sequence[int]) -> Tuple[int, ...]:
    """Validate which maps of a block are gated and return them as a tuple."""
    given = tuple(gated_maps) if isinstance(gated_maps, Sequence) else ()
    if not given or len(set(given)) < len(given) or not set(given) <= set(maps):
        raise ValueError(f'gated_maps of this block must be one or more of {tuple(maps)}, got {gated_maps!r}.')
    return given


class GatedBlock(nn.Module):
    """Mixin for timm's blocks that adds gates.

    The index of a map is the number of convolutions before it: 0 is the input of the first convolution, and the last
    one is the residual branch, before it is added to the shortcut.

    Args:
        inplanes: Input channel dimensionality.
        planes: Used to determine output channel dimensionalities.
        stride: Stride of the block.
        downsample: Optional downsample layer for the residual path.
        gated_maps: Indices of the gated maps; by default the inner ones.
        gate_before_act: Whether inner maps are switched before their activation instead of after it.
        gate_layer: Gate class or factory, called with (in_channels, num_gates).
        **kwargs: Arguments of timm's block.
    """

    num_convs: int

    gate_before_act: bool
    gate_pool: GatePool

    def __init__(
            self,
            inplanes: int,
            planes: int,
            stride: int = 1,
            downsample: Optional[nn.Module] = None,
            gated_maps: Optional[Sequence[int]] = None,
            gate_before_act: bool = False,
            gate_layer: Callable[..., Gate] = ChannelGate,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(inplanes, planes, stride, downsample, **kwargs, **dd)
        self._add_gates(gated_maps, gate_before_act, gate_layer, **dd)

    @classmethod
    def from_dense(cls, block: Any, **kwargs) -> 'GatedBlock':
        """Turn timm's block into this class, in place. Its parameters, buffers and children stay the same objects.

        Args:
            block: Block of the class that this class extends.
            **kwargs: The options `gated_maps`, `gate_before_act` and `gate_layer`.
        """
        block.__class__ = cls
        block._add_gates(**kwargs, device=block.conv1.weight.device, dtype=block.conv1.weight.dtype)
        return block

    def _add_gates(
            self,
            gated_maps: Optional[Sequence[int]] = None,
            gate_before_act: bool = False,
            gate_layer: Callable[..., Gate] = ChannelGate,
            device=None,
            dtype=None,
    ) -> None:
        convs = [getattr(self, f'conv{index}') for index in range(1, self.num_convs + 1)]
        maps = range(self.num_convs + 1)
        gated_maps = check_maps(maps[1:-1] if gated_maps is None else gated_maps, maps)
        self.gate_before_act = gate_before_act
        self.gate_pool = GatePool()
        inplanes = convs[0].in_channels
        channels = [inplanes, *(conv.out_channels for conv in convs)]
        for index in maps:  # maps without a gate have None, as after pruning
            gate = gate_layer(inplanes, channels[index], device=device, dtype=dtype) if index in gated_maps else None
            self.add_module(f'gate{index}', gate)

    @property
    def gated_convs(self) -> GatedConvs:
        gates: List[Any] = [getattr(self, f'gate{index}') for index in range(self.num_convs + 1)]
        return {f'conv{index}': (gates[index - 1], gates[index]) for index in range(1, self.num_convs + 1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_masked(x, decide(self, range(self.num_convs + 1), x))

    def forward_masked(self, x: torch.Tensor, masks: MapMasks) -> torch.Tensor:
        """Run the block with the given masks."""
        raise NotImplementedError

    def _activate(self, x: torch.Tensor, act: nn.Module, masks: MapMasks, index: int) -> torch.Tensor:
        """Activate and switch an inner map."""
        return act(switch(x, masks, index)) if self.gate_before_act else switch(act(x), masks, index)


def decide(block: Any, maps: Iterable[int], x: torch.Tensor) -> MapMasks:
    """Masks of the gated maps. The input is pooled once for all gates.

    Args:
        block: A block with a `gate_pool` and attributes `gate0`, `gate1`, …, each a gate or None.
        maps: Indices of the maps.
        x: Input of the block.
    """
    masks: MapMasks = {}
    pooled = None
    for index in maps:
        gate = getattr(block, f'gate{index}')
        if gate is not None:
            pooled = block.gate_pool(x) if pooled is None else pooled
            masks[index] = gate(pooled)
    return masks


def switch(x: torch.Tensor, masks: MapMasks, index: int) -> torch.Tensor:
    """Switch the channels of a map, if it is gated."""
    return apply_gate(x, masks[index]) if index in masks else x


def basic_branch(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Residual branch of timm's BasicBlock."""
    x = block.bn1(block.conv1(x))
    x = block.aa(block.act1(block.drop_block(x)))
    x = block.bn2(block.conv2(x))
    return _end_branch(block, x)


def bottleneck_branch(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Residual branch of timm's Bottleneck."""
    x = block.act1(block.bn1(block.conv1(x)))
    x = block.bn2(block.conv2(x))
    x = block.aa(block.act2(block.drop_block(x)))
    x = block.bn3(block.conv3(x))
    return _end_branch(block, x)


def _end_branch(block: Any, x: torch.Tensor) -> torch.Tensor:
    if block.se is not None:
        x = block.se(x)
    return x if block.drop_path is None else block.drop_path(x)


def shortcut_of(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Shortcut of timm's blocks, from their input."""
    return x if block.downsample is None else block.downsample(x)


def add_shortcut(block: Any, x: torch.Tensor, shortcut: torch.Tensor, act: nn.Module) -> torch.Tensor:
    """Add the shortcut to the residual branch and activate the sum, as timm's blocks do.

    Args:
        block: The block.
        x: Output of the residual branch.
        shortcut: Input of the block.
        act: Last activation of the block.
    """
    x = _end_branch(block, x)
    x += shortcut_of(block, shortcut)
    return act(x)


class GatedBasicBlock(GatedBlock, BasicBlock):
    """timm's BasicBlock with gated maps, by default map 1. Arguments as for `GatedBlock`."""

    num_convs = 2

    def forward_masked(self, x: torch.Tensor, masks: MapMasks) -> torch.Tensor:
        shortcut = x

        x = self.conv1(switch(x, masks, 0))
        x = self.bn1(x)
        x = self.drop_block(x)
        x = self._activate(x, self.act1, masks, 1)
        x = self.aa(x)  # type: ignore[misc]

        x = self.conv2(x)
        x = self.bn2(x)
        x = switch(x, masks, 2)

        return add_shortcut(self, x, shortcut, self.act2)


class GatedBottleneck(GatedBlock, Bottleneck):
    """timm's Bottleneck with gated maps, by default maps 1 and 2. Arguments as for `GatedBlock`."""

    num_convs = 3

    def forward_masked(self, x: torch.Tensor, masks: MapMasks) -> torch.Tensor:
        shortcut = x

        x = self.conv1(switch(x, masks, 0))
        x = self.bn1(x)
        x = self._activate(x, self.act1, masks, 1)

        x = self.conv2(x)
        x = self.bn2(x)
        x = self.drop_block(x)
        x = self._activate(x, self.act2, masks, 2)
        x = self.aa(x)  # type: ignore[misc]

        x = self.conv3(x)
        x = self.bn3(x)
        x = switch(x, masks, 3)

        return add_shortcut(self, x, shortcut, self.act3)
