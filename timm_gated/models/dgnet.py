"""DGNet: channel gates that are trained to a MAC budget

A baseline for batch shaping: `timm.create_model('dgnet_resnet34', budget=0.5)`. The budget is a share of the dense
counterpart's MACs, and the loss `MacBudget` drives the gates there.

Paper: Dynamic Dual Gating Neural Networks (DGNet, https://openaccess.thecvf.com/content/ICCV2021/html/
    Li_Dynamic_Dual_Gating_Neural_Networks_ICCV_2021_paper.html)

Only the channel gates of the paper's dual gating are implemented, not the spatial gates. A channel gate is a
`ChannelGate` over an inner map: a squeeze of the block's input, two layers, a binary concrete sample. The network is
therefore that of `gated_resnet34`, with the FLOPs-target loss lambda * (F / F0 - t)^2 instead of batch shaping and L0.
The following choices are ours: the weight lambda, gates that start open, the hidden width of 16, and gates that count
towards F.
"""
from dataclasses import replace
from typing import Any

from timm.models import generate_default_cfgs, register_model

from ..layers import GatedBasicBlock, GatedBottleneck
from .gated_resnet import CHANNEL_GATING, GatedResNet, build_imagenet_resnet, imagenet_cfg

__all__: list = []

default_cfgs = generate_default_cfgs({
    f'dgnet_resnet{depth}.untrained': imagenet_cfg(paper_ids=None) for depth in (18, 34, 50)})

METHOD = replace(CHANNEL_GATING, objective=None, objective_options=())


def _create_dgnet(depth: int, pretrained: bool = False, **kwargs: Any) -> GatedResNet:
    model_args = dict(budget=0.5, gate_bias=2.)
    return build_imagenet_resnet(
        f'dgnet_resnet{depth}', depth, pretrained, method=METHOD, **dict(model_args, **kwargs))


@register_model
def dgnet_resnet18(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-18 with channel gates and a MAC budget."""
    model_args = dict(block=GatedBasicBlock, layers=(2, 2, 2, 2))
    return _create_dgnet(18, pretrained, **dict(model_args, **kwargs))


@register_model
def dgnet_resnet34(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-34 with channel gates and a MAC budget."""
    model_args = dict(block=GatedBasicBlock, layers=(3, 4, 6, 3))
    return _create_dgnet(34, pretrained, **dict(model_args, **kwargs))


@register_model
def dgnet_resnet50(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-50 with channel gates over both inner maps of its bottlenecks and a MAC budget."""
    model_args = dict(block=GatedBottleneck, layers=(3, 4, 6, 3))
    return _create_dgnet(50, pretrained, **dict(model_args, **kwargs))
