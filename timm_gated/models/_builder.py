"""Build gated networks with timm's builder"""
from functools import partial
from typing import Any, Callable, Dict, Iterable, Mapping, Optional

import torch.nn as nn
from timm.models import build_model_with_cfg

from ..loss import scale_epochs
from ..utils import check_number
from ._checkpoint import checkpoint_filter_fn
from ._config import check_entry_args
from ._gated_net import GatedNet
from ._method import BUILD_OPTIONS, GatingMethod

__all__ = ['build_model', 'build_gated_net', 'from_dense_options']


def build_model(model_cls: Callable[..., nn.Module], variant: str, pretrained: bool, **kwargs) -> Any:
    """Call timm's builder after checking the options that a downloaded config sets.

    Args:
        model_cls: Class of the model, or a function that builds it.
        variant: Name of the entry point.
        pretrained: Load the weights of the pretrained config.
        **kwargs: Arguments of timm's builder and of the model.
    """
    check_entry_args(kwargs)
    model: Any = build_model_with_cfg(model_cls, variant, pretrained, **kwargs)
    # A config.json has lists for tuples, which timm's ONNX exporter does not accept.
    model.pretrained_cfg.update({k: tuple(v) for k, v in model.pretrained_cfg.items() if isinstance(v, list)})
    return model


def build_gated_net(
        model_cls: Callable[..., GatedNet],
        variant: str,
        pretrained: bool,
        dense_variant: str,
        method: GatingMethod,
        recipe: Optional[Mapping[str, Any]] = None,
        recipe_epochs: Optional[float] = None,
        schedule_epochs: Optional[float] = None,
        **kwargs,
) -> Any:
    """Build a gated network.

    Args:
        model_cls: Class of the network, or a function that builds it.
        variant: Name of the entry point.
        pretrained: Load the weights of the pretrained config.
        dense_variant: Entry point of the dense counterpart.
        method: Gating method; `timm_gated.models._method` says where each option goes.
        recipe: Default arguments of the objective.
        recipe_epochs: Number of training epochs that the schedules in the recipe are for.
        schedule_epochs: Number of training epochs to scale these schedules to.
        **kwargs: Options of the gates, the objective, the blocks and the network, and arguments of timm's builder.
    """
    recipe = dict(recipe or {})
    if schedule_epochs is not None:
        check_number(schedule_epochs, 'schedule_epochs', above=0)
        if not any(name.endswith('_epochs') for name in recipe) or recipe_epochs is None:
            raise ValueError(f'schedule_epochs scales a schedule, but {variant} has none; got {schedule_epochs}.')
        recipe = scale_epochs(recipe, schedule_epochs / recipe_epochs)

    gate_args = {method.gate_options[name]: value for name, value in _take(kwargs, method.gate_options).items()}
    objective_args = _take(kwargs, method.objective_options)
    block_args = dict(kwargs.pop('block_args', None) or {})
    gating_args = {**_take(block_args, method.block_options), **_take(kwargs, method.block_options)}

    model = build_model(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        objective=None if method.objective is None else partial(method.objective, **{**recipe, **objective_args}),
        block_args=dict(block_args, gate_layer=partial(method.gate_layer, **gate_args), **gating_args),
        **kwargs,
    )
    model.dense_variant = dense_variant
    if block_args:
        kwargs['block_args'] = block_args
    gated_only = {*method.network_options, *BUILD_OPTIONS}
    model.dense_args = {name: value for name, value in kwargs.items() if name not in gated_only}
    return model


def _take(kwargs: Dict[str, Any], names: Iterable[str]) -> Dict[str, Any]:
    """Remove the named arguments from `kwargs` and return them."""
    return {name: kwargs.pop(name) for name in names if name in kwargs}


def from_dense_options(epochs: Optional[float], schedule_epochs: Optional[float] = None) -> Dict[str, Any]:
    """Options to add gates to a trained network and fine-tune it for a few epochs.

    Gates start open, so that the network starts close to the dense one. Batch shaping is weak, because otherwise it
    would move all gates to the mean of the prior within an epoch, and ends after half of the training. The noise of the
    gates ends shortly after, so that the last epochs train the network as it is evaluated. A budget or gamma sets the
    sparsity.

    Args:
        epochs: Number of training epochs, None for no options.
        schedule_epochs: Value of the option `schedule_epochs`, which these options exclude.
    """
    if epochs is None:
        return {}
    if schedule_epochs is not None:
        raise ValueError(
            f'from_dense is the length of the training already: use it without schedule_epochs, got {epochs} and '
            f'{schedule_epochs}.')
    check_number(epochs, 'from_dense, the number of epochs,', above=0)
    return dict(
        gate_bias=2., lam=0.003, lam_epochs=(0, epochs / 2), gamma=0., gamma_epochs=(0, epochs / 4),
        noise_epochs=(0, epochs * 5 / 8))
