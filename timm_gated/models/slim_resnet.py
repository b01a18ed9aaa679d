"""Dense ResNets for ImageNet with inner maps of any width

timm's ResNets with an additional option, `inner_channels` (see `timm_gated.layers.narrow`), for gated ResNets whose
gates and unused filters were pruned: `slim_resnet50d` is the dense counterpart of `gated_resnet50d`, and so on. Without
the option they equal timm's ResNets.
"""
from functools import partial
from typing import Any, Optional

from timm.models import generate_default_cfgs, model_entrypoint
from timm.models.resnet import ResNet

from ..layers import Channels, narrow_maps
from ._builder import build_model
from ._checkpoint import check_depth, checkpoint_filter_fn
from ._family import RESNETS, first_conv, register_variants
from .gated_resnet import imagenet_cfg

__all__ = ['SlimResNet']


class SlimResNet(ResNet):
    """timm's ResNet with inner maps of any width."""

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        check_depth(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


default_cfgs = generate_default_cfgs({
    f'slim_{name}.untrained': imagenet_cfg(first_conv=first_conv(name), paper_ids='arXiv:1512.03385')
    for name in RESNETS})


def _narrow_dense(dense_name: str, inner_channels: Optional[Channels] = None, **kwargs: Any) -> SlimResNet:
    """Build timm's ResNet and narrow its inner maps."""
    network: Any = model_entrypoint(dense_name)(**kwargs)
    network.__class__ = SlimResNet
    narrow_maps(network, inner_channels)
    return network


def _create_slim_resnet(name: str, pretrained: bool = False, **kwargs: Any) -> SlimResNet:
    return build_model(
        partial(_narrow_dense, name), f'slim_{name}', pretrained, pretrained_filter_fn=checkpoint_filter_fn, **kwargs)


register_variants(__name__, 'slim', _create_slim_resnet, "Constructs timm's {} with inner maps of any width.")
