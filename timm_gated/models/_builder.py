"""How gated networks are built: from flat options, by timm's builder"""
import inspect
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Type

import torch.nn as nn
from timm.models import build_model_with_cfg

from ..layers import ChannelGate, Gate
from ..loss import GateLosses, Objective, scale_epochs
from ..utils import check_number
from ._checkpoint import checkpoint_filter_fn
from ._config import check_entry_args
from ._gated_net import GatedNet

__all__ = ['build_model', 'build_gated_net', 'from_dense_options']

# Arguments of an entry point that are not options of its network: the block, and what timm's builder takes.
_NOT_DENSE = frozenset({
    *inspect.signature(build_model_with_cfg).parameters,
    'block', 'features_only', 'out_indices', 'feature_cls', 'device', 'dtype'})


def build_model(model_cls: Type[nn.Module], variant: str, pretrained: bool, **kwargs) -> Any:
    """timm's builder, with a check of what a config from elsewhere asks for.

    Args:
        model_cls: Class of the model.
        variant: Name of the entry point.
        pretrained: Load the weights of the pretrained config.
        **kwargs: Arguments of timm's builder, and options of the model.
    """
    check_entry_args(kwargs)
    model: Any = build_model_with_cfg(model_cls, variant, pretrained, **kwargs)
    # A config of a hub or a folder has lists for tuples, which timm's ONNX exporter does not take.
    model.pretrained_cfg.update({k: tuple(v) for k, v in model.pretrained_cfg.items() if isinstance(v, list)})
    return model


def build_gated_net(
        model_cls: Type[GatedNet],
        variant: str,
        pretrained: bool,
        dense_variant: str,
        gate_layer: Type[Gate] = ChannelGate,
        objective: Optional[Type[Objective]] = GateLosses,
        recipe: Optional[Mapping[str, Any]] = None,
        recipe_epochs: Optional[float] = None,
        schedule_epochs: Optional[float] = None,
        **kwargs,
) -> Any:
    """Build a gated network with timm's builder.

    The options of the gates and of the objective are flat keyword arguments, so that one of them can be changed from a
    command line. Those of the objective have the names of its signature, those of the gates `gate_` before it:
    `gate_temperature`, `gate_bias`, and `gate_hidden` for hidden channels. `gated_maps` and
    `gate_before_act` go to the blocks.

    Args:
        model_cls: A `GatedNet`.
        variant: Name of the entry point.
        pretrained: Load the weights of the pretrained config.
        dense_variant: Name of the entry point of the same network without gates.
        gate_layer: Class of the gates; the blocks get it, with its options, as `gate_layer`.
        objective: Class of what the network is trained with beside its task loss and a budget; None for nothing.
        recipe: Default arguments of the objective: the schedule for the family's data set.
        recipe_epochs: Length of the training that the recipe is made for.
        schedule_epochs: Length of the training at hand, to which the schedules of the recipe are scaled.
        **kwargs: Options of gates, objective and of the ResNet.
    """
    recipe = dict(recipe or {})
    if schedule_epochs is not None:
        check_number(schedule_epochs, 'schedule_epochs', above=0)
        if not any(name.endswith('_epochs') for name in recipe) or recipe_epochs is None:
            raise ValueError(f'schedule_epochs scales a schedule, but {variant} has none; got {schedule_epochs}.')
        recipe = scale_epochs(recipe, schedule_epochs / recipe_epochs)
    loss_options = [] if objective is None else _options(objective)
    losses = {k: kwargs.pop(k) for k in loss_options if k in kwargs}
    names = {f'gate_{option.removesuffix("_channels")}': option for option in _options(gate_layer)}
    gate_args = {option: kwargs.pop(name) for name, option in names.items() if name in kwargs}
    block_args = dict(kwargs.pop('block_args', None) or {})
    block_options = ('gated_maps', 'gate_before_act')
    gating = {k: options.pop(k) for options in (block_args, kwargs) for k in block_options if k in options}
    model = build_model(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        objective=None if objective is None else partial(objective, **{**recipe, **losses}),
        **dict(kwargs, block_args=dict(block_args, gate_layer=partial(gate_layer, **gate_args), **gating)),
    )
    model.dense_variant = dense_variant
    if block_args:
        kwargs['block_args'] = block_args
    model.dense_args = {k: v for k, v in kwargs.items() if k not in _NOT_DENSE and k not in model_cls.gating_options}
    return model


def from_dense_options(epochs: Optional[float], schedule_epochs: Optional[float] = None) -> Dict[str, Any]:
    """Options for gating a trained network in a few epochs; a budget, or gamma, says how sparse it is to become.

    Gates start open, so that the network starts much as it is. Batch shaping is weak, or it would take every gate to
    its prior's mean within an epoch, and gone after half of them; then the noise goes as well, so that the last epochs
    train the network that is going to be evaluated.

    Args:
        epochs: Epochs of the training; None for no options.
        schedule_epochs: Option of that name, for a schedule that these options replace.
    """
    if epochs is None:
        return {}
    if schedule_epochs is not None:
        raise ValueError(
            f'from_dense is the length of the training already: give it without schedule_epochs, got {epochs} and '
            f'{schedule_epochs}.')
    check_number(epochs, 'from_dense, the epochs in which a trained network is gated,', above=0)
    return dict(
        gate_bias=2., lam=0.003, lam_epochs=(0, epochs / 2), gamma=0., gamma_epochs=(0, epochs / 4),
        noise_epochs=(0, epochs * 5 / 8))


def _options(cls: Type[nn.Module]) -> List[str]:
    """Parameters of a class that have a default, apart from where its tensors are."""
    parameters = inspect.signature(cls).parameters.items()
    return [k for k, v in parameters if v.default is not v.empty and k not in ('device', 'dtype')]


