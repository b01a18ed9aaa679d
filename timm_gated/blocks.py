"""Gated residual blocks

timm's residual blocks with the inner feature maps switched per image by gates that read the block's input.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The gate multiplies after the activation: the forward values are the same as before a ReLU, but a closed filter then
gets no gradient, which the paper found to be what makes training stable. The paper does not say which maps of a
bottleneck are gated; here both inner maps are, each by a gate of its own, unless `gated_maps` says otherwise.
"""
from typing import Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.models.resnet import BasicBlock, Bottleneck

from .gate import ChannelGate, Gate, GatePool, apply_gate

__all__ = ['GatedBasicBlock', 'GatedBottleneck', 'GatedConvs', 'check_maps']

# What gates switch in a block, by the convolution's name: the gate over its inputs and the gate over its outputs. One
# decision of a gate stands for an equal share of them: a filter, or, if it is the only one, the whole convolution.
GatedConvs = Dict[str, Tuple[Optional[Gate], Optional[Gate]]]


def check_maps(gated_maps: Sequence[int], allowed: Sequence[Tuple[int, ...]]) -> Tuple[int, ...]:
    """Validate which inner maps of a block are gated and return them as a tuple."""
    if not isinstance(gated_maps, Sequence) or tuple(sorted(gated_maps)) not in allowed:
        raise ValueError(f'gated_maps of this block must be {" or ".join(map(str, allowed))}, got {gated_maps!r}.')
    return tuple(gated_maps)


class GatedBasicBlock(BasicBlock):
    """timm's BasicBlock with a gate over its inner map.

    Args:
        inplanes: Input channel dimensionality.
        planes: Output channel dimensionality.
        stride: Stride of the first convolution.
        downsample: Optional downsample layer for the residual path.
        gated_maps: Which inner maps are gated; there is one, 1. (Pruning may take its gate away.)
        gate_layer: Makes a gate from (in_channels, num_gates).
        **kwargs: As for timm's BasicBlock.
    """

    def __init__(
            self,
            inplanes: int,
            planes: int,
            stride: int = 1,
            downsample: Optional[nn.Module] = None,
            gated_maps: Sequence[int] = (1,),
            gate_layer: Callable[..., Gate] = ChannelGate,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(inplanes, planes, stride, downsample, **kwargs, **dd)
        check_maps(gated_maps, ((1,),))
        self.gate_pool = GatePool()
        self.gate1: Optional[Gate] = gate_layer(inplanes, self.conv1.out_channels, **dd)

    @property
    def gated_convs(self) -> GatedConvs:
        return {'conv1': (None, self.gate1), 'conv2': (self.gate1, None)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        mask = self.gate1(self.gate_pool(x)) if self.gate1 is not None else None

        x = self.conv1(x)
        x = self.bn1(x)
        x = self.drop_block(x)
        x = self.act1(x)
        if mask is not None:
            x = apply_gate(x, mask)
        x = self.aa(x)  # type: ignore[misc]

        x = self.conv2(x)
        x = self.bn2(x)

        if self.se is not None:
            x = self.se(x)

        if self.drop_path is not None:
            x = self.drop_path(x)

        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act2(x)

        return x


class GatedBottleneck(Bottleneck):
    """timm's Bottleneck with gates over its two inner maps, or one of them.

    Args:
        inplanes: Input channel dimensionality.
        planes: Used to determine output channel dimensionalities.
        stride: Stride of the 3x3 convolution.
        downsample: Optional downsample layer for the residual path.
        gated_maps: Which inner maps are gated: 1 is the map after conv1, 2 the map after conv2.
        gate_layer: Makes a gate from (in_channels, num_gates).
        **kwargs: As for timm's Bottleneck.
    """

    def __init__(
            self,
            inplanes: int,
            planes: int,
            stride: int = 1,
            downsample: Optional[nn.Module] = None,
            gated_maps: Sequence[int] = (1, 2),
            gate_layer: Callable[..., Gate] = ChannelGate,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(inplanes, planes, stride, downsample, **kwargs, **dd)
        check_maps(gated_maps, ((1,), (2,), (1, 2)))
        if self.conv2.groups > 1:
            raise ValueError(f'gates need plain convolutions: cardinality must be 1, got {self.conv2.groups}.')
        self.gate_pool = GatePool()
        self.gate1 = gate_layer(inplanes, self.conv1.out_channels, **dd) if 1 in gated_maps else None
        self.gate2 = gate_layer(inplanes, self.conv2.out_channels, **dd) if 2 in gated_maps else None

    @property
    def gated_convs(self) -> GatedConvs:
        return {'conv1': (None, self.gate1), 'conv2': (self.gate1, self.gate2), 'conv3': (self.gate2, None)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        mask1 = mask2 = None
        if self.gate1 is not None or self.gate2 is not None:
            pooled = self.gate_pool(x)
            mask1 = self.gate1(pooled) if self.gate1 is not None else None
            mask2 = self.gate2(pooled) if self.gate2 is not None else None

        x = self.conv1(x)
        x = self.bn1(x)
        x = self.act1(x)
        if mask1 is not None:
            x = apply_gate(x, mask1)

        x = self.conv2(x)
        x = self.bn2(x)
        x = self.drop_block(x)
        x = self.act2(x)
        if mask2 is not None:
            x = apply_gate(x, mask2)
        x = self.aa(x)  # type: ignore[misc]

        x = self.conv3(x)
        x = self.bn3(x)

        if self.se is not None:
            x = self.se(x)

        if self.drop_path is not None:
            x = self.drop_path(x)

        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act3(x)

        return x
