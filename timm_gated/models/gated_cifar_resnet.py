"""Gated ResNets for CIFAR

The CIFAR ResNets with the paper's channel gates in every block: `timm.create_model('gated_resnet20')`.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

`gated_resnet20_w10` and `_w20` widen the inner, gated map of every block by factors of 10 and 20. This is our reading
of the paper's "per-block width", which it does not define.
"""
from typing import Any, Dict, Optional, Type

from timm.models import generate_default_cfgs, register_model

from ..layers import GatedBasicBlock
from ._builder import build_gated_net, from_dense_options
from ._gated_net import GatedNet
from ._registry import weights_file
from .cifar_resnet import CIFAR_DEPTHS, CifarResNet, cifar_cfg, cifar_layers
from .gated_resnet import CHANNEL_GATING

__all__ = ['CIFAR10_RECIPE', 'GatedCifarResNet', 'build_cifar_resnet']

# The paper's schedule: lambda = 0.75 falls to 0 over epochs 0-100, gamma ramps up over epochs 100-300 (of 500).
# Its trade-off points are gamma = 0, 0.01, 0.02, 0.05, 0.1, 0.15 and 0.2.
CIFAR10_EPOCHS = 500
CIFAR10_RECIPE: Dict[str, Any] = dict(lam=0.75, lam_epochs=(0, 100), gamma=0.05, gamma_epochs=(100, 300))


class GatedCifarResNet(GatedNet, CifarResNet):
    """CifarResNet of gated blocks."""


def _cfg(**kwargs) -> Dict[str, Any]:
    return cifar_cfg(paper_ids='arXiv:1907.06627', **kwargs)


default_cfgs = generate_default_cfgs({
    'gated_resnet20.bas_c10': _cfg(file=weights_file('gated_resnet20.bas_c10')),
    'gated_resnet20.l0_c10': _cfg(file=weights_file('gated_resnet20.l0_c10')),
    # dense weights, to be gated
    'gated_resnet20.dense_e40_c10': _cfg(file=weights_file('cifar_resnet20.e40_c10')),
    'gated_resnet32.dense_e30_c10': _cfg(file=weights_file('cifar_resnet32.e30_c10')),
    **{f'gated_resnet{depth}.untrained': _cfg() for depth in CIFAR_DEPTHS},
    'gated_resnet20_w10.untrained': _cfg(),
    'gated_resnet20_w20.untrained': _cfg(),
})


def build_cifar_resnet(
        variant: str,
        depth: int,
        pretrained: bool = False,
        model_cls: Type[GatedCifarResNet] = GatedCifarResNet,
        **kwargs,
) -> Any:
    """Build a gated CIFAR ResNet with any method, see `build_gated_net`."""
    return build_gated_net(
        model_cls,
        variant,
        pretrained,
        dense_variant=f'cifar_resnet{depth}',
        recipe_epochs=CIFAR10_EPOCHS,
        feature_cfg=dict(out_indices=(0, 1, 2, 3)),
        **dict(dict(layers=cifar_layers(depth)), **kwargs),
    )


def _create_gated_resnet(
        depth: int,
        pretrained: bool = False,
        variant: Optional[str] = None,
        from_dense: Optional[float] = None,
        **kwargs,
) -> GatedCifarResNet:
    options = from_dense_options(from_dense, kwargs.get('schedule_epochs'))
    model_args = dict(block=GatedBasicBlock, recipe=CIFAR10_RECIPE, **options)
    return build_cifar_resnet(
        variant or f'gated_resnet{depth}', depth, pretrained, method=CHANNEL_GATING, **dict(model_args, **kwargs))


@register_model
def gated_resnet20(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-20 with channel gates."""
    return _create_gated_resnet(20, pretrained, **kwargs)


@register_model
def gated_resnet32(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-32 with channel gates."""
    return _create_gated_resnet(32, pretrained, **kwargs)


@register_model
def gated_resnet38(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-38 with channel gates."""
    return _create_gated_resnet(38, pretrained, **kwargs)


@register_model
def gated_resnet44(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-44 with channel gates."""
    return _create_gated_resnet(44, pretrained, **kwargs)


@register_model
def gated_resnet56(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-56 with channel gates."""
    return _create_gated_resnet(56, pretrained, **kwargs)


@register_model
def gated_resnet74(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-74 with channel gates."""
    return _create_gated_resnet(74, pretrained, **kwargs)


@register_model
def gated_resnet110(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-110 with channel gates."""
    return _create_gated_resnet(110, pretrained, **kwargs)


@register_model
def gated_resnet20_w10(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-20 with channel gates and inner maps 10 times as wide."""
    model_args = dict(inner_width=10)
    return _create_gated_resnet(20, pretrained, variant='gated_resnet20_w10', **dict(model_args, **kwargs))


@register_model
def gated_resnet20_w20(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-20 with channel gates and inner maps 20 times as wide."""
    model_args = dict(inner_width=20)
    return _create_gated_resnet(20, pretrained, variant='gated_resnet20_w20', **dict(model_args, **kwargs))
