"""Load checkpoints into gated networks

The state dict of a gated network is that of its dense counterpart plus the keys of its gates. Dense weights therefore
load by name, and gates keep their initial values.
"""
import logging
import re
from collections import Counter
from typing import Any, Dict, List, Mapping, Type

import torch.nn as nn
from timm.models import clean_state_dict

from ..layers import Gating
from ..loss import Objective

__all__ = ['check_depth', 'check_incoming', 'checkpoint_filter_fn', 'rename_linear_head']

_logger = logging.getLogger(__name__)

StateDict = Dict[str, Any]


def checkpoint_filter_fn(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Convert a dense or gated checkpoint into a state dict for `model`. Only keys of gates may be missing.

    Accepts state dicts of timm, torchvision and the common CIFAR ResNets (whose head is called `linear`), and training
    checkpoints that contain one. Raises a ValueError that names the differences if the checkpoint does not fit.

    Args:
        state_dict: Checkpoint.
        model: Gated model, or a dense model of this package.
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
    """Check a state dict that is being loaded: refuse another depth, and log which gates it has no weights for.

    The names of the gates without weights are also stored on the network, as `fresh_gates`.

    Args:
        model: Network.
        state_dict: State dict that is being loaded.
        prefix: Prefix of the network's keys in the state dict.
        error: Exception class for a mismatch.
    """
    check_depth(model, state_dict, prefix, error)
    learnt = [n for n, m in model.named_modules() if isinstance(m, Gating) and m.state_dict()]
    fresh = [n for n in learnt if not any(k.startswith(f'{prefix}{n}.') for k in state_dict)]
    if fresh:
        _logger.warning(
            f'The checkpoint has no weights for {len(fresh)} of {len(learnt)} gates; '
            f'these keep their fresh initialisation: {fresh[0]}{" … " + fresh[-1] if len(fresh) > 1 else ""}.')
    before = getattr(model, 'fresh_gates', fresh)  # gates that have no weights from an earlier checkpoint either
    model.fresh_gates = tuple(n for n in fresh if n in before)  # type: ignore[assignment]


def check_depth(
        model: nn.Module,
        state_dict: StateDict,
        prefix: str = '',
        error: Type[Exception] = RuntimeError,
) -> None:
    """Refuse a state dict of another depth with a short message instead of a list of all keys.

    Args:
        model: ResNet.
        state_dict: State dict that is being loaded.
        prefix: Prefix of the network's keys in the state dict.
        error: Exception class for a mismatch.
    """
    mismatch = _depth_mismatch(state_dict, model, prefix)
    if mismatch:
        raise error(mismatch)


def rename_linear_head(state_dict: StateDict, prefix: str = '') -> None:
    """Rename the head of the common CIFAR ResNets, `linear`, to timm's `fc`. In place."""
    for name in ('weight', 'bias'):
        if f'{prefix}linear.{name}' in state_dict:
            state_dict[f'{prefix}fc.{name}'] = state_dict.pop(f'{prefix}linear.{name}')


def _blocks(keys, prefix: str = '') -> List[int]:
    """Number of blocks per stage, from parameter names."""
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
    """Describe what does not fit. Gates are ignored, and so are stem and head, which timm adapts."""
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
