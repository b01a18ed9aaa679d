"""Where each option of a gated model goes

All options are flat keyword arguments of the entry point, so that a command line or a config can set any of them:
`timm.create_model('gated_resnet20', gate_bias=2., gamma=0.1, budget=0.5, drop_rate=0.1)`. The builder sends each to the
first destination in this table that lists it. Each method lists its own options in a `GatingMethod` beside its classes.

    destination   listed in                          option of the dense counterpart
    gates         GatingMethod.gate_options          no
    objective     GatingMethod.objective_options     no
    blocks        GatingMethod.block_options         no
    network       GatingMethod.network_options       no
    timm          BUILD_OPTIONS                      no
    ResNet        (all others)                       yes

The ResNet raises a TypeError for options that it does not know.
"""
from dataclasses import dataclass
from typing import Mapping, Optional, Tuple, Type

from ..layers import Gate
from ..loss import Objective

__all__ = ['BUILD_OPTIONS', 'GatingMethod', 'NETWORK_OPTIONS']

# Options of `GatedNet`. (Its `inner_channels` is an option of the dense counterpart too.)
NETWORK_OPTIONS = ('budget', 'budget_weight', 'gather_gates', 'gated_channels')

# Arguments of timm's builder, and arguments of the ResNet that its dense counterpart does not inherit.
BUILD_OPTIONS = (
    'model_cls', 'variant', 'pretrained', 'pretrained_cfg', 'pretrained_cfg_overlay', 'model_cfg', 'feature_cfg',
    'pretrained_strict', 'pretrained_filter_fn', 'cache_dir', 'kwargs_filter', 'pretrained_model_args', 'features_only',
    'out_indices', 'feature_cls', 'block', 'device', 'dtype',
)


@dataclass(frozen=True)
class GatingMethod:
    """Classes of a gating method and the names of their options.

    Attributes:
        gate_layer: Class of the gates. Blocks receive it, with its options, as `gate_layer`.
        gate_options: Arguments of the gates by the name of the option.
        objective: Class of the objective, None if the network has no objective but a budget.
        objective_options: Arguments of the objective.
        block_options: Arguments of the blocks. They may also be set in `block_args`.
        network_options: Arguments of the network.
    """
    gate_layer: Type[Gate]
    gate_options: Mapping[str, str]
    objective: Optional[Type[Objective]] = None
    objective_options: Tuple[str, ...] = ()
    block_options: Tuple[str, ...] = ()
    network_options: Tuple[str, ...] = NETWORK_OPTIONS
