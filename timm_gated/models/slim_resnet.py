"""Dense ResNets for ImageNet with inner maps of any width

timm's ResNets with an additional option, `inner_channels` (see `timm_gated.layers.narrow`), for gated ResNets whose
gates and unused filters were pruned. Without the option they equal timm's ResNets.
"""
from typing import Any, Optional

from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck, ResNet

from ..layers import Channels, narrow_maps
from ._builder import build_model
from ._checkpoint import check_depth, checkpoint_filter_fn
from .gated_resnet import imagenet_cfg

__all__ = ['SlimResNet']


class SlimResNet(ResNet):
    """timm's ResNet with inner maps of any width.

    Args:
        *args: Arguments of timm's ResNet.
        inner_channels: Widths of the blocks' inner maps.
        **kwargs: Keyword arguments of timm's ResNet.
    """

    def __init__(self, *args: Any, inner_channels: Optional[Channels] = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        narrow_maps(self, inner_channels)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        check_depth(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


default_cfgs = generate_default_cfgs({
    f'slim_resnet{depth}.untrained': imagenet_cfg(paper_ids='arXiv:1512.03385') for depth in (18, 34, 50, 101, 152)})


def _create_slim_resnet(variant: str, pretrained: bool = False, **kwargs) -> SlimResNet:
    return build_model(SlimResNet, variant, pretrained, pretrained_filter_fn=checkpoint_filter_fn, **kwargs)


@register_model
def slim_resnet18(pretrained: bool = False, **kwargs) -> SlimResNet:
    """Constructs a ResNet-18 with inner maps of any width."""
    model_args = dict(block=BasicBlock, layers=(2, 2, 2, 2))
    return _create_slim_resnet('slim_resnet18', pretrained, **dict(model_args, **kwargs))


@register_model
def slim_resnet34(pretrained: bool = False, **kwargs) -> SlimResNet:
    """Constructs a ResNet-34 with inner maps of any width."""
    model_args = dict(block=BasicBlock, layers=(3, 4, 6, 3))
    return _create_slim_resnet('slim_resnet34', pretrained, **dict(model_args, **kwargs))


@register_model
def slim_resnet50(pretrained: bool = False, **kwargs) -> SlimResNet:
    """Constructs a ResNet-50 with inner maps of any width."""
    model_args = dict(block=Bottleneck, layers=(3, 4, 6, 3))
    return _create_slim_resnet('slim_resnet50', pretrained, **dict(model_args, **kwargs))


@register_model
def slim_resnet101(pretrained: bool = False, **kwargs) -> SlimResNet:
    """Constructs a ResNet-101 with inner maps of any width."""
    model_args = dict(block=Bottleneck, layers=(3, 4, 23, 3))
    return _create_slim_resnet('slim_resnet101', pretrained, **dict(model_args, **kwargs))


@register_model
def slim_resnet152(pretrained: bool = False, **kwargs) -> SlimResNet:
    """Constructs a ResNet-152 with inner maps of any width."""
    model_args = dict(block=Bottleneck, layers=(3, 8, 36, 3))
    return _create_slim_resnet('slim_resnet152', pretrained, **dict(model_args, **kwargs))
