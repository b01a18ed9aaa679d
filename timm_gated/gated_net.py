"""What all gated networks have in common, whatever their ResNet

The weight-decay exemption of the gates, the gate losses that belong to the model, and how checkpoints come in: a
gated network's state dict is the dense one's plus gate keys, so dense weights load by name under fresh gates.
"""
import inspect
import logging
import re
from collections import Counter
from functools import partial
from typing import Any, Dict, List, Mapping, Optional, Set, Type

import torch
import torch.nn as nn
from timm.models import build_model_with_cfg, clean_state_dict

from .gate import ChannelGate, gates
from .narrow import Channels, narrow_maps
from .objective import GateLosses, Objective

__all__ = [
    'GatedNet', 'build_model', 'check_incoming', 'checkpoint_filter_fn', 'create_gated_net', 'rename_linear_head',
]

_logger = logging.getLogger(__name__)

StateDict = Dict[str, Any]


class GatedNet(nn.Module):
    """Mixin that turns a ResNet of gated blocks into a gated network.

    Args:
        *args: Of the ResNet.
        gate_losses: Arguments of `GateLosses`, which the stock training tasks add to their loss.
        inner_channels: Widths of the blocks' inner maps (see `timm_gated.narrow`), after pruning.
        gated_channels: How many of their channels have gates.
        **kwargs: Of the ResNet.

    Attributes:
        model_args: Options of the entry point that the model was made with.
        dense_variant: Entry point of the same network without gates.
        dense_args: Its options.
    """

    model_args: Dict[str, Any]
    dense_variant: str
    dense_args: Dict[str, Any]
    pretrained_cfg: Dict[str, Any]
    num_classes: int

    def __init__(
            self,
            *args,
            gate_losses: Optional[Mapping[str, Any]] = None,
            inner_channels: Optional[Channels] = None,
            gated_channels: Optional[Channels] = None,
            **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        narrow_maps(self, inner_channels, gated_channels)
        # Last of the children: timm's feature extraction runs them in order, up to the last one it needs.
        self.gate_losses = GateLosses(**(gate_losses or {}))

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return {
            f'{name}.{parameter}'
            for name, module in self.named_modules() if isinstance(module, (ChannelGate, Objective))
            for parameter, _ in module.named_parameters()
        }

    def _load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        mismatch = check_incoming(self, state_dict, prefix)
        if mismatch:
            error_msgs.append(mismatch)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


def build_model(
        model_cls: Type[nn.Module],
        variant: str,
        pretrained: bool,
        model_args: Optional[Mapping[str, Any]] = None,
        **kwargs,
) -> Any:
    """timm's builder. The model gets the options that it was made with as `model_args`, to be saved in its config.

    Args:
        model_cls: Class of the model.
        variant: Name of the entry point.
        pretrained: Load the weights of the pretrained config.
        model_args: The options of the entry point, if they are not those of the class.
        **kwargs: Of timm's builder, and options of the model.
    """
    model: Any = build_model_with_cfg(model_cls, variant, pretrained, **kwargs)
    model.model_args = _options_of_model(kwargs if model_args is None else model_args)
    return model


def _options_of_model(kwargs: Mapping[str, Any]) -> Dict[str, Any]:
    """Without what belongs to the entry point, or to the way in which a model is made."""
    others = {'block', 'features_only', 'out_indices', 'feature_cls'}
    return {k: v for k, v in kwargs.items() if k not in {*inspect.signature(build_model_with_cfg).parameters, *others}}


def create_gated_net(
        model_cls: Type[nn.Module],
        variant: str,
        pretrained: bool,
        recipe: Mapping[str, Any],
        dense_variant: str,
        **kwargs,
) -> Any:
    """Build a gated network with timm's builder.

    The options of the gates (`gate_hidden`, `gate_temperature`, `gate_bias`, `gated_maps`) and of the losses (those of
    `GateLosses`) are flat keyword arguments, so that one of them can be changed from a command line.

    Args:
        model_cls: A `GatedNet`.
        variant: Name of the entry point.
        pretrained: Load the weights of the pretrained config.
        recipe: Default arguments of `GateLosses`: the paper's schedule for the family's data set.
        dense_variant: Name of the entry point of the same network without gates.
        **kwargs: Options of gates, losses and of the ResNet.
    """
    model_args = dict(kwargs)
    losses = dict(recipe, **{k: kwargs.pop(k) for k in inspect.signature(GateLosses).parameters if k in kwargs})
    gate_options = {'gate_hidden': 'hidden_channels', 'gate_temperature': 'temperature', 'gate_bias': 'bias'}
    gate_args = {gate_options[k]: kwargs.pop(k) for k in tuple(kwargs) if k in gate_options}
    gated_block_args = dict(kwargs.get('block_args') or {}, gate_layer=partial(ChannelGate, **gate_args))
    if 'gated_maps' in kwargs:
        gated_block_args['gated_maps'] = kwargs.pop('gated_maps')
    model = build_model(
        model_cls,
        variant,
        pretrained,
        model_args=model_args,
        pretrained_filter_fn=checkpoint_filter_fn,
        gate_losses=losses,
        **dict(kwargs, block_args=gated_block_args),
    )
    model.dense_variant = dense_variant
    model.dense_args = _options_of_model({k: v for k, v in kwargs.items() if k != 'gated_channels'})
    return model


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


def check_incoming(model: nn.Module, state_dict: StateDict, prefix: str = '') -> str:
    """What keeps a state dict from being loaded into a gated network, if anything; the log says which gates stay fresh.

    Args:
        model: The network.
        state_dict: The state dict that is being loaded.
        prefix: Of the network's keys in it.
    """
    fresh = [n for n, _ in gates(model) if not any(k.startswith(f'{prefix}{n}.') for k in state_dict)]
    if fresh:
        _logger.warning(
            f'The checkpoint has no weights for {len(fresh)} of {len(gates(model))} gates; '
            f'these keep their fresh initialisation: {fresh[0]}{" … " + fresh[-1] if len(fresh) > 1 else ""}.')
    return _depth_mismatch(state_dict, model, prefix)


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


def _depth_mismatch(state_dict: StateDict, model: nn.Module, prefix: str = '') -> str:
    theirs, ours = _blocks(state_dict, prefix), _blocks(model.state_dict())
    if not theirs or theirs == ours:
        return ''
    return (
        f'the checkpoint is of another depth: its stages have {"-".join(map(str, theirs))} blocks, '
        f'those of this {type(model).__name__} have {"-".join(map(str, ours))}.')


def _key_mismatch(state_dict: StateDict, model: nn.Module) -> str:
    """What does not fit, apart from gates, and apart from stem and head, which timm adapts itself."""
    own = model.state_dict()
    ours = tuple(f'{n}.' for n, m in model.named_modules() if isinstance(m, (ChannelGate, Objective)))
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
