"""Gated ResNets as mmsegmentation backbones

mmseg's ResNet, ResNetV1c, ResNetV1d and ResNeXt with the channel gates of `timm_gated` in every block.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

Masks are applied to the input of the next convolution: after the ReLU and after plugins. Parameter names are mmseg's
plus those of the gates, so dense checkpoints load by name: of a backbone, or of a network with one.

`SlimResNet` and `SlimResNeXt` are mmseg's networks with inner maps of any width, the result of `specialize`.
"""
import inspect
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn
from mmseg.models.backbones.resnet import BasicBlock, Bottleneck, ResNet
from mmseg.models.backbones.resnext import Bottleneck as ResNeXtBottleneck
from mmseg.models.backbones.resnext import ResNeXt
from mmseg.registry import MODELS
from torch.utils.checkpoint import checkpoint

from timm_gated.inference import Trunk, register_forward, trunk
from timm_gated.layers import (
    ChannelGate,
    Channels,
    GatedConvs,
    GatePool,
    check_maps,
    decide,
    gated_channels,
    gates,
    inner_channels,
    narrow_maps,
    switch,
)
from timm_gated.models import check_depth, check_incoming
from timm_gated.pruning import without_gates
from timm_gated.utils import install

from .convert import take_backbone

__all__ = [
    'GatedResNeXt', 'GatedResNet', 'GatedResNetV1c', 'GatedResNetV1d', 'SlimResNeXt', 'SlimResNet', 'backbone_cfg',
]

_GATE_OPTIONS = ('hidden_channels', 'temperature', 'bias')


class _GatedBlock(nn.Module):
    """Mixin over mmseg's blocks.

    Args:
        *args: Arguments of mmseg's block.
        gated_maps: Indices of the gated inner maps, from 1; all by default.
        gate_cfg: Options of the gates.
        **kwargs: Arguments of mmseg's block.
    """

    inner_maps: Tuple[int, ...]
    with_cp: bool

    def __init__(
            self,
            *args,
            gated_maps: Optional[Sequence[int]] = None,
            gate_cfg: Optional[Dict[str, Any]] = None,
            **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.gated_maps = check_maps(self.inner_maps if gated_maps is None else gated_maps, self.inner_maps)
        self.gate_pool = GatePool()
        in_channels: Any = self.conv1.in_channels  # type: ignore[union-attr]
        for index in self.gated_maps:
            gate = ChannelGate(in_channels, getattr(self, f'conv{index}').out_channels, **(gate_cfg or {}))
            self.add_module(f'gate{index}', gate)

    @property
    def gated_convs(self) -> GatedConvs:
        gate = {index: getattr(self, f'gate{index}') for index in self.gated_maps}
        num_convs = len(self.inner_maps) + 1
        return {f'conv{index}': (gate.get(index - 1), gate.get(index)) for index in range(1, num_convs + 1)}

    def _recomputed(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Apply a function, with activation checkpointing if `with_cp` is set."""
        if self.with_cp and x.requires_grad:
            # mmseg uses reentrant checkpointing, in which the logits of the gates would have no gradient.
            return checkpoint(function, x, use_reentrant=False)
        return function(x)


class GatedBasicBlock(_GatedBlock, BasicBlock):
    """mmseg's BasicBlock with a gated inner map."""

    inner_maps = (1,)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:

        def inner_forward(x: torch.Tensor) -> torch.Tensor:
            masks = decide(self, self.gated_maps, x)

            out = self.relu(self.norm1(self.conv1(x)))
            out = switch(out, masks, 1)

            out = self.norm2(self.conv2(out))
            out += x if self.downsample is None else self.downsample(x)
            return out

        return self.relu(self._recomputed(inner_forward, x))


class GatedBottleneck(_GatedBlock, Bottleneck):
    """mmseg's Bottleneck with one or two gated inner maps."""

    inner_maps = (1, 2)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:

        def inner_forward(x: torch.Tensor) -> torch.Tensor:
            masks = decide(self, self.gated_maps, x)

            out = self.relu(self.norm1(self.conv1(x)))
            if self.with_plugins:
                out = self.forward_plugin(out, self.after_conv1_plugin_names)
            out = switch(out, masks, 1)

            out = self.relu(self.norm2(self.conv2(out)))
            if self.with_plugins:
                out = self.forward_plugin(out, self.after_conv2_plugin_names)
            out = switch(out, masks, 2)

            out = self.norm3(self.conv3(out))
            if self.with_plugins:
                out = self.forward_plugin(out, self.after_conv3_plugin_names)
            out += x if self.downsample is None else self.downsample(x)
            return out

        return self.relu(self._recomputed(inner_forward, x))


class GatedResNeXtBottleneck(GatedBottleneck, ResNeXtBottleneck):
    """mmseg's Bottleneck of ResNeXt, whose second convolution is grouped, with one or two gated inner maps."""


def _named_args(cls: Callable, *args, **kwargs) -> Dict[str, Any]:
    """Arguments of mmseg's ResNet or ResNeXt by name."""
    named = dict(inspect.signature(cls).bind(*args, **kwargs).arguments)
    return {**named.pop('kwargs', {}), **named}


@MODELS.register_module()
class GatedResNet(ResNet):
    """mmseg's ResNet with gated blocks.

    Args:
        *args: Arguments of mmseg's ResNet.
        gated_maps: Indices of the gated inner maps of each block, from 1; all by default.
        gate_cfg: Options of the gates: `hidden_channels`, `temperature`, `bias`.
        inner_channels: Widths of the inner maps of a pruned network (see `timm_gated.layers.narrow`).
        gated_channels: Numbers of gated channels of these maps.
        **kwargs: Arguments of mmseg's ResNet.
    """

    arch_settings = {
        depth: (GatedBasicBlock if block is BasicBlock else GatedBottleneck, layers)
        for depth, (block, layers) in ResNet.arch_settings.items()
    }
    dense_cls: Type[ResNet] = ResNet

    def __init__(
            self,
            *args,
            gated_maps: Optional[Sequence[int]] = None,
            gate_cfg: Optional[Dict[str, Any]] = None,
            inner_channels: Optional[Channels] = None,
            gated_channels: Optional[Channels] = None,
            **kwargs,
    ) -> None:
        unknown = sorted(set(gate_cfg or {}) - set(_GATE_OPTIONS))
        if unknown:
            raise ValueError(f'gate_cfg must have no keys but {", ".join(_GATE_OPTIONS)}, got {", ".join(unknown)}.')
        self._gate_args = dict(gated_maps=gated_maps, gate_cfg=gate_cfg)
        self.resnet_args = _named_args(self.dense_cls, *args, **kwargs)
        # mmseg zero-initialises the last norm of its own block classes only, not of subclasses.
        fresh = self.resnet_args.get('pretrained') is None and self.resnet_args.get('init_cfg') is None
        self._zero_init = fresh and self.resnet_args.get('zero_init_residual', True)
        super().__init__(*args, **kwargs)
        narrow_maps(self, inner_channels, gated_channels)

    def make_res_layer(self, **kwargs) -> nn.Module:
        if self._zero_init:
            last_norm = f'norm{len(kwargs["block"].inner_maps) + 1}'
            kwargs['init_cfg'] = dict(type='Constant', val=0, override=dict(name=last_norm))
        return super().make_res_layer(**kwargs, **self._gate_args)

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args) -> None:
        take_backbone(self, state_dict, prefix)
        check_incoming(self, state_dict, prefix, ValueError)
        super()._load_from_state_dict(state_dict, prefix, *args)


@MODELS.register_module()
class GatedResNetV1c(GatedResNet):
    """mmseg's ResNetV1c (deep stem) with gated blocks. Arguments are those of `GatedResNet`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, deep_stem=True, avg_down=False, **kwargs)


@MODELS.register_module()
class GatedResNetV1d(GatedResNet):
    """mmseg's ResNetV1d (deep stem, pooled shortcuts) with gated blocks. Arguments are those of `GatedResNet`."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, deep_stem=True, avg_down=True, **kwargs)


@MODELS.register_module()
class GatedResNeXt(GatedResNet, ResNeXt):
    """mmseg's ResNeXt with gated blocks. Arguments are those of ResNeXt and the keyword arguments of `GatedResNet`."""

    arch_settings = {
        depth: (GatedResNeXtBottleneck, layers) for depth, (_, layers) in ResNeXt.arch_settings.items()}
    dense_cls = ResNeXt


@MODELS.register_module()
class SlimResNet(ResNet):
    """mmseg's ResNet with inner maps of any width; `deep_stem` and `avg_down` make it a ResNetV1c or V1d.

    Args:
        *args: Arguments of mmseg's ResNet.
        inner_channels: Widths of the inner maps.
        **kwargs: Arguments of mmseg's ResNet.
    """

    dense_cls: Type[ResNet] = ResNet

    def __init__(self, *args, inner_channels: Optional[Channels] = None, **kwargs) -> None:
        install()
        self.resnet_args = _named_args(self.dense_cls, *args, **kwargs)
        super().__init__(*args, **kwargs)
        narrow_maps(self, inner_channels)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        take_backbone(self, state_dict, prefix)
        check_depth(self, state_dict, prefix, ValueError)
        super()._load_from_state_dict(state_dict, prefix, *args)


@MODELS.register_module()
class SlimResNeXt(SlimResNet, ResNeXt):
    """mmseg's ResNeXt with inner maps of any width. Arguments are those of ResNeXt and `inner_channels`."""

    dense_cls = ResNeXt


def backbone_cfg(backbone: Union[GatedResNet, SlimResNet]) -> Dict[str, Any]:
    """Config of a backbone, pruned or not, without its weights."""
    if not isinstance(backbone, (GatedResNet, SlimResNet)):
        raise ValueError(
            f'to be saved, a pruned backbone must be a GatedResNet, GatedResNetV1c, GatedResNetV1d, GatedResNeXt, '
            f'SlimResNet or SlimResNeXt, got a {type(backbone).__name__}.')
    args = {k: v for k, v in backbone.resnet_args.items() if k not in ('init_cfg', 'pretrained')}
    cfg = dict(args, inner_channels=inner_channels(backbone))
    if isinstance(backbone, GatedResNet):
        gate_args = {k: v for k, v in backbone._gate_args.items() if v is not None}
        cfg.update(gate_args, gated_channels=gated_channels(backbone))
    prefix = 'Gated' if isinstance(backbone, GatedResNet) else 'Slim'
    return dict(type=prefix + backbone.dense_cls.__name__, **cfg)


@without_gates.register
def _(network: GatedResNet) -> nn.Module:
    if gates(network):
        return network
    cfg = backbone_cfg(network)
    slim_cls = SlimResNeXt if isinstance(network, GatedResNeXt) else SlimResNet
    slim = slim_cls(**{k: v for k, v in cfg.items() if k not in ('type', 'gated_channels', *network._gate_args)})
    slim.load_state_dict(network.state_dict())
    slim.to(next(network.parameters()))
    for name, parameter in slim.named_parameters():
        parameter.requires_grad_(network.get_parameter(name).requires_grad)
    slim.eval()
    return slim


for _cls in (ResNet, BasicBlock, Bottleneck, GatedBasicBlock, GatedBottleneck):
    register_forward(_cls)


@trunk.register
def _(model: ResNet) -> Trunk:
    """Layers of mmseg's ResNets, gated or dense, for `timm_gated.accelerate`."""
    stem = [model.stem] if model.deep_stem else [model.conv1, model.norm1, model.relu]
    stages = [(getattr(model, name), index in model.out_indices) for index, name in enumerate(model.res_layers)]
    return Trunk([*((module, False) for module in (*stem, model.maxpool)), *stages], tuple)
