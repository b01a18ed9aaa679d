"""Gated ResNets for ImageNet

timm's ResNets with the paper's channel gates in every block: `timm.create_model('gated_resnet34')`.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

Block weights keep timm's names. The tags `dense_a1_in1k` load timm's dense ImageNet weights under fresh gates.
"""
from typing import Any, Dict, Optional, Type

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import ResNet

from ..layers import ChannelGate, GatedBasicBlock, GatedBottleneck
from ..loss import GateLosses
from ._builder import build_gated_net, from_dense_options
from ._gated_net import GatedNet
from ._method import GatingMethod

__all__ = ['CHANNEL_GATING', 'GatedResNet', 'IMAGENET_RECIPE', 'build_imagenet_resnet', 'imagenet_cfg']

# The method of the paper, for ImageNet and CIFAR.
CHANNEL_GATING = GatingMethod(
    gate_layer=ChannelGate,
    gate_options=dict(gate_hidden='hidden_channels', gate_temperature='temperature', gate_bias='bias'),
    objective=GateLosses,
    objective_options=(
        'lam', 'lam_epochs', 'gamma', 'gamma_epochs', 'prior', 'prior_end', 'prior_epochs', 'lam_reduction',
        'gamma_reduction', 'noise_epochs', 'log_interval', 'snapshot_dir', 'snapshot_gates'),
    block_options=('gated_maps', 'gate_before_act'),
)

# The paper's schedule: lambda = 0.75 falls to 0 over epochs 0-20, gamma ramps up over epochs 30-60 (of 150).
# Its trade-off points are gamma = 0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3 and 0.4.
IMAGENET_EPOCHS = 150
IMAGENET_RECIPE: Dict[str, Any] = dict(lam=0.75, lam_epochs=(0, 20), gamma=0.05, gamma_epochs=(30, 60))


class GatedResNet(GatedNet, ResNet):
    """timm's ResNet of gated blocks."""


def imagenet_cfg(**kwargs) -> Dict[str, Any]:
    """Pretrained config of a ResNet for ImageNet."""
    return {
        'num_classes': 1000, 'input_size': (3, 224, 224), 'pool_size': (7, 7),
        'crop_pct': 0.875, 'interpolation': 'bilinear',
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'conv1', 'classifier': 'fc',
        'license': 'apache-2.0', 'paper_ids': 'arXiv:1907.06627',
        **kwargs
    }


def _dense_cfg(depth: int) -> Dict[str, Any]:
    """timm's weights of the RSB paper, recipe A1."""
    return imagenet_cfg(
        hf_hub_id=f'timm/resnet{depth}.a1_in1k', interpolation='bicubic', crop_pct=0.95,
        test_input_size=(3, 288, 288), test_crop_pct=1.0,
        origin_url='https://github.com/huggingface/pytorch-image-models', paper_ids='arXiv:2110.00476')


default_cfgs = generate_default_cfgs({
    # The star, together with the second place, makes the untrained config the default.
    'gated_resnet18.dense_a1_in1k': _dense_cfg(18),
    'gated_resnet18.untrained*': imagenet_cfg(),
    'gated_resnet34.dense_a1_in1k': _dense_cfg(34),
    'gated_resnet34.untrained*': imagenet_cfg(),
    'gated_resnet50.dense_a1_in1k': _dense_cfg(50),
    'gated_resnet50.untrained*': imagenet_cfg(),
    'gated_resnet101.dense_a1_in1k': _dense_cfg(101),
    'gated_resnet101.untrained*': imagenet_cfg(),
    'gated_resnet152.dense_a1_in1k': _dense_cfg(152),
    'gated_resnet152.untrained*': imagenet_cfg(),
})


def build_imagenet_resnet(
        variant: str,
        depth: int,
        pretrained: bool = False,
        model_cls: Type[GatedResNet] = GatedResNet,
        **kwargs,
) -> Any:
    """Build a gated ResNet for ImageNet with any method, see `build_gated_net`."""
    return build_gated_net(
        model_cls, variant, pretrained, dense_variant=f'slim_resnet{depth}', recipe_epochs=IMAGENET_EPOCHS, **kwargs)


def _create_gated_resnet(
        depth: int,
        pretrained: bool = False,
        from_dense: Optional[float] = None,
        **kwargs,
) -> GatedResNet:
    model_args = dict(recipe=IMAGENET_RECIPE, **from_dense_options(from_dense, kwargs.get('schedule_epochs')))
    return build_imagenet_resnet(
        f'gated_resnet{depth}', depth, pretrained, method=CHANNEL_GATING, **dict(model_args, **kwargs))


@register_model
def gated_resnet18(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-18 with channel gates."""
    model_args = dict(block=GatedBasicBlock, layers=(2, 2, 2, 2))
    return _create_gated_resnet(18, pretrained, **dict(model_args, **kwargs))


@register_model
def gated_resnet34(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-34 with channel gates."""
    model_args = dict(block=GatedBasicBlock, layers=(3, 4, 6, 3))
    return _create_gated_resnet(34, pretrained, **dict(model_args, **kwargs))


@register_model
def gated_resnet50(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-50 with channel gates over both inner maps of its bottlenecks."""
    model_args = dict(block=GatedBottleneck, layers=(3, 4, 6, 3))
    return _create_gated_resnet(50, pretrained, **dict(model_args, **kwargs))


@register_model
def gated_resnet101(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-101 with channel gates over both inner maps of its bottlenecks."""
    model_args = dict(block=GatedBottleneck, layers=(3, 4, 23, 3))
    return _create_gated_resnet(101, pretrained, **dict(model_args, **kwargs))


@register_model
def gated_resnet152(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-152 with channel gates over both inner maps of its bottlenecks."""
    model_args = dict(block=GatedBottleneck, layers=(3, 8, 36, 3))
    return _create_gated_resnet(152, pretrained, **dict(model_args, **kwargs))
