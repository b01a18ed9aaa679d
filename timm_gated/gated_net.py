"""What all gated networks have in common, whatever their ResNet

The weight-decay exemption of the gates, the gate losses that belong to the model, and how checkpoints come in: a
gated network's state dict is the dense one's plus gate keys, so dense weights load by name under fresh gates.
"""
import inspect
import logging
import re
from collections import Counter
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple, Type

import torch
import torch.nn as nn
from timm.models import build_model_with_cfg, clean_state_dict, list_models, model_entrypoint

from .budget import MacBudget
from .checks import check_number
from .gate import ChannelGate, Gate, Gating
from .hub_config import check_entry_args
from .narrow import Channels, narrow_maps
from .objective import GateLosses, Objective, objectives
from .schedules import scale_epochs

__all__ = [
    'GatedNet', 'build_model', 'check_depth', 'check_incoming', 'checkpoint_filter_fn', 'create_gated_net',
    'from_dense_options', 'list_gated_models', 'rename_linear_head',
]

_logger = logging.getLogger(__name__)

StateDict = Dict[str, Any]

# Arguments of an entry point that are not options of its network: the block, and what timm's builder takes.
_NOT_DENSE = frozenset({
    *inspect.signature(build_model_with_cfg).parameters,
    'block', 'features_only', 'out_indices', 'feature_cls', 'device', 'dtype'})


class GatedNet(nn.Module):
    """Mixin that turns a ResNet of gated blocks into a gated network.

    Args:
        *args: Of the ResNet.
        objective: Makes what the network is trained with beside its task loss, which the stock training tasks add.
        budget: Share of the plain network's MACs to aim at as well, see `MacBudget`; none by default.
        budget_weight: Weight of that loss.
        gather_gates: In a training on several processes, compute the losses on gates and what is logged of them over
            the batch of all, as one process with the whole batch would. By default each has its own batch shaping, as
            in the paper.
        inner_channels: Widths of the blocks' inner maps (see `timm_gated.narrow`), after pruning.
        gated_channels: How many of their channels have gates.
        **kwargs: Of the ResNet.

    Attributes:
        gating_options: Names of the options that the same network without gates does not have.
        dense_variant: Entry point of the same network without gates.
        dense_args: Its options.
    """

    gating_options: Tuple[str, ...] = ('gated_channels', 'budget', 'budget_weight', 'gather_gates')
    dense_variant: str
    dense_args: Dict[str, Any]
    pretrained_cfg: Dict[str, Any]
    num_classes: int

    def __init__(
            self,
            *args,
            objective: Optional[Callable[[], Objective]] = GateLosses,
            budget: Optional[float] = None,
            budget_weight: Optional[float] = None,
            gather_gates: bool = False,
            inner_channels: Optional[Channels] = None,
            gated_channels: Optional[Channels] = None,
            **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        narrow_maps(self, inner_channels, gated_channels)
        self.link_gates()
        # Last of the children: timm's feature extraction runs them in order, up to the last one it needs.
        if objective is not None:
            self.gate_losses = objective()
            self.gate_losses.attach(self)
        if budget is not None:
            self.mac_budget = MacBudget(budget, **({} if budget_weight is None else dict(budget_weight=budget_weight)))
        elif budget_weight is not None:
            raise ValueError(f'budget_weight needs a budget, got {budget_weight} and none.')
        if not isinstance(gather_gates, bool):
            raise ValueError(f'gather_gates must be True or False, got {gather_gates!r}.')
        for module in objectives(self):
            module.gather_gates = gather_gates

    def link_gates(self) -> None:
        """Make gates known to one another, where a method has them share something. Called once all are there."""

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return {
            f'{name}.{parameter}'
            for name, module in self.named_modules() if isinstance(module, (Gate, Objective))
            for parameter, _ in module.named_parameters()
        }

    def _load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        check_incoming(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


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


def create_gated_net(
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


def list_gated_models(pattern: str = '') -> List[str]:
    """Names of the timm models that are gated networks, of whatever method: those whose entry point says so.

    Args:
        pattern: Wildcards, as for `timm.list_models`.
    """
    returned = ((name, model_entrypoint(name).__annotations__.get('return')) for name in list_models(pattern))
    return [name for name, cls in returned if isinstance(cls, type) and issubclass(cls, GatedNet)]


def checkpoint_filter_fn(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Turn a dense or gated checkpoint into a state dict of `model`; only keys of gates may be missing from it.

    Takes state dicts of timm and torchvision, those of the common CIFAR ResNets (whose head is called `linear`), and
    training checkpoints that nest one. A checkpoint that does not fit is refused with what differs.

    Args:
        state_dict: The checkpoint.
        model: A gated model, or a dense one of this package.
    """
    for key in ('state_dict', 'model'):
        if isinstance(state_dict.get(key), Mapping):
            state_dict = state_dict[key]
            break
    out = clean_state_dict(state_dict)
    rename_linear_head(out)
    mismatch = _depth_mismatch(out, model) or _key_mismatch(out, model)
    if mismatch:
        raise ValueError(mismatch)
    return out


def check_incoming(
        model: nn.Module,
        state_dict: StateDict,
        prefix: str = '',
        error: Type[Exception] = RuntimeError,
) -> None:
    """Refuse a state dict of another depth. The log says which gates another one leaves fresh, and so does the network,
    as `fresh_gates`.

    Args:
        model: The network.
        state_dict: The state dict that is being loaded.
        prefix: Of the network's keys in it.
        error: What to raise.
    """
    check_depth(model, state_dict, prefix, error)
    learnt = [n for n, m in model.named_modules() if isinstance(m, Gating) and m.state_dict()]
    fresh = [n for n in learnt if not any(k.startswith(f'{prefix}{n}.') for k in state_dict)]
    if fresh:
        _logger.warning(
            f'The checkpoint has no weights for {len(fresh)} of {len(learnt)} gates; '
            f'these keep their fresh initialisation: {fresh[0]}{" … " + fresh[-1] if len(fresh) > 1 else ""}.')
    before = getattr(model, 'fresh_gates', fresh)  # which a checkpoint loaded earlier had none for either
    model.fresh_gates = tuple(n for n in fresh if n in before)  # type: ignore[assignment]


def check_depth(
        model: nn.Module,
        state_dict: StateDict,
        prefix: str = '',
        error: Type[Exception] = RuntimeError,
) -> None:
    """Refuse a state dict of another depth, with a sentence that says so in place of a list of all keys.

    Args:
        model: A ResNet.
        state_dict: The state dict that is being loaded.
        prefix: Of the network's keys in it.
        error: What to raise.
    """
    mismatch = _depth_mismatch(state_dict, model, prefix)
    if mismatch:
        raise error(mismatch)


def rename_linear_head(state_dict: StateDict, prefix: str = '') -> None:
    """Give the head of the common CIFAR ResNets, `linear`, timm's name. In place."""
    for name in ('weight', 'bias'):
        if f'{prefix}linear.{name}' in state_dict:
            state_dict[f'{prefix}fc.{name}'] = state_dict.pop(f'{prefix}linear.{name}')


def _blocks(keys, prefix: str = '') -> List[int]:
    """Number of blocks in each stage, from the names of parameters."""
    found = {m.group(1, 2) for m in (re.match(re.escape(prefix) + r'layer(\d+)\.(\d+)\.', k) for k in keys) if m}
    counts = Counter(stage for stage, _ in found)
    return [counts[stage] for stage in sorted(counts, key=int)]


def _convs_per_block(keys, prefix: str = '') -> int:
    """Number of convolutions in a block, from the names of parameters; 0 if there are none."""
    found = (re.match(re.escape(prefix) + r'layer\d+\.\d+\.conv(\d+)\.', k) for k in keys)
    return max((int(m.group(1)) for m in found if m), default=0)


def _depth_mismatch(state_dict: StateDict, model: nn.Module, prefix: str = '') -> str:
    keys, name = model.state_dict().keys(), type(model).__name__
    theirs, ours = _blocks(state_dict, prefix), _blocks(keys)
    if theirs and theirs[:len(ours)] != ours:  # (a network may be without the last stages)
        return (
            f'the checkpoint is of another depth: its stages have {"-".join(map(str, theirs))} blocks, '
            f'those of this {name} have {"-".join(map(str, ours))}.')
    convs, own_convs = _convs_per_block(state_dict, prefix), _convs_per_block(keys)
    if convs and convs != own_convs:  # of 34 and 50 layers, which have as many blocks
        return (
            f'the checkpoint is of another depth: its blocks have {convs} convolutions, '
            f'those of this {name} have {own_convs}.')
    return ''


def _key_mismatch(state_dict: StateDict, model: nn.Module) -> str:
    """What does not fit, apart from gates, and apart from stem and head, which timm adapts itself."""
    own = model.state_dict()
    ours = tuple(f'{n}.' for n, m in model.named_modules() if isinstance(m, (Gating, Objective)))
    adapted = ('conv1.', 'fc.')

    def relevant(key: str) -> bool:
        return not key.startswith(ours + adapted) and not key.endswith('num_batches_tracked')

    missing = [k for k in own if relevant(k) and k not in state_dict]
    unexpected = [k for k in state_dict if relevant(k) and k not in own]
    shapes = [
        f'{k} {tuple(v.shape)} instead of {tuple(own[k].shape)}'
        for k, v in state_dict.items() if k in own and relevant(k) and v.shape != own[k].shape]
    parts = [
        f'{what}: {", ".join(names[:3])}{" …" if len(names) > 3 else ""}'
        for what, names in (('missing', missing), ('unexpected', unexpected), ('other shapes', shapes)) if names]
    return f'the checkpoint does not fit this {type(model).__name__}; {"; ".join(parts)}.' if parts else ''
