"""Gated ResNets for ImageNet

Every ResNet of timm with the paper's channel gates in its blocks: `timm.create_model('gated_resnet34')`,
`gated_resnet50d`, `gated_wide_resnet50_2`, `gated_resnext50_32x4d`, `gated_seresnet50`, `gated_resnetrs50`, and all
others that `timm.list_models(module='gated_resnet')` lists.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

timm's entry point builds the network, and gates are added to its blocks, so options, weight names and new variants are
timm's. Every pretrained tag of timm loads dense weights under fresh gates: `gated_resnet50d.ra2_in1k`. The default tag
has no weights, since gates must be trained. `_family` says which networks are left out.
"""
from functools import partial
from typing import Any, Dict, List, Optional, Type

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, model_entrypoint
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch.nn.modules.batchnorm import _NormBase
from torchvision.ops import FrozenBatchNorm2d

from ..layers import ChannelGate, GatedBasicBlock, GatedBlock, GatedBottleneck
from ..loss import GateLosses
from ._builder import build_gated_net, from_dense_options
from ._family import RESNETS, first_conv, pretrained_cfgs, register_variants
from ._gated_net import GatedNet
from ._method import NETWORK_OPTIONS, GatingMethod

__all__ = ['CHANNEL_GATING', 'GatedResNet', 'IMAGENET_RECIPE', 'build_imagenet_resnet', 'check_blocks', 'imagenet_cfg']

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


GATED_BLOCKS: Dict[type, Type[GatedBlock]] = {BasicBlock: GatedBasicBlock, Bottleneck: GatedBottleneck}


class GatedResNet(GatedNet, ResNet):
    """timm's ResNet of gated blocks."""

    @classmethod
    def from_dense(cls, network: Any, block_args: Dict[str, Any], **kwargs) -> 'GatedResNet':
        """Turn timm's ResNet into this class, in place, with gates in all blocks.

        Args:
            network: ResNet of timm's blocks.
            block_args: Options of `GatedBlock`.
            **kwargs: Options of `GatedNet`.
        """
        for block in check_blocks(network):
            GATED_BLOCKS[type(block)].from_dense(block, **block_args)
        network.__class__ = cls
        network._equip(**kwargs)
        return network


def check_blocks(network: Any) -> List[Any]:
    """Blocks of timm's ResNet. Raises a ValueError if one cannot be gated."""
    stages = [info['module'] for info in network.feature_info[1:]]  # the first one is the stem
    blocks = {f'{stage}.{name}': block for stage in stages
              for name, block in network.get_submodule(stage).named_children()}
    for name, block in blocks.items():
        if type(block) not in GATED_BLOCKS:
            raise ValueError(
                f"'{name}' is a {type(block).__name__}; gates are added to timm's BasicBlock and Bottleneck. Gate a "
                f'block of your own with a class as in examples/own_block.py.')
        for index in range(1, GATED_BLOCKS[type(block)].num_convs):
            norm = getattr(block, f'bn{index}')
            if not isinstance(norm, (_NormBase, FrozenBatchNorm2d)):
                raise ValueError(
                    f"'{name}.bn{index}' is a {type(norm).__name__}, which may compute statistics over several "
                    f"filters, so that none can be skipped. Use a norm per channel: norm_layer='batchnorm2d'.")
    return list(blocks.values())


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


def _cfgs(name: str) -> Dict[str, Any]:
    """Pretrained configs of a gated ResNet: those of timm's weights, and the untrained one, which is the default."""
    dense = pretrained_cfgs(name)
    cfgs: Dict[str, Any] = {f'gated_{name}.{tag}': cfg for tag, cfg in dense.items()}
    if name in FIRST:
        cfgs[f'gated_{name}.dense_a1_in1k'] = dense['a1_in1k']
    # The star, together with the last place, makes the untrained config the default.
    return {**cfgs, f'gated_{name}.untrained*': imagenet_cfg(first_conv=first_conv(name))}


# Their weights had tags of another form, which still work.
FIRST = ('resnet18', 'resnet34', 'resnet50', 'resnet101', 'resnet152')
default_cfgs = generate_default_cfgs({tag: cfg for name in RESNETS for tag, cfg in _cfgs(name).items()})


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


def _gate_dense(
        dense_name: str,
        block_args: Dict[str, Any],
        objective: Any,
        **kwargs,
) -> GatedResNet:
    """Build timm's ResNet and add gates. `block_args` has the options of timm's blocks and those of `GatedBlock`."""
    network_args = {name: kwargs.pop(name) for name in (*NETWORK_OPTIONS, 'inner_channels') if name in kwargs}
    gating_args = {
        name: block_args.pop(name) for name in ('gate_layer', *CHANNEL_GATING.block_options) if name in block_args}
    if block_args:
        kwargs['block_args'] = block_args
    network = model_entrypoint(dense_name)(**kwargs)
    return GatedResNet.from_dense(network, gating_args, objective=objective, **network_args)


def _create_gated_resnet(
        name: str,
        pretrained: bool = False,
        from_dense: Optional[float] = None,
        **kwargs,
) -> GatedResNet:
    model_args = dict(recipe=IMAGENET_RECIPE, **from_dense_options(from_dense, kwargs.get('schedule_epochs')))
    return build_gated_net(
        partial(_gate_dense, name), f'gated_{name}', pretrained, dense_variant=f'slim_{name}', method=CHANNEL_GATING,
        recipe_epochs=IMAGENET_EPOCHS, **dict(model_args, **kwargs))


register_variants(__name__, 'gated', _create_gated_resnet, "Constructs timm's {} with channel gates.")
