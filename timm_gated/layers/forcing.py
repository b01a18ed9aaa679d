"""Force the gates of a model within a context"""
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Mapping, Union

import torch
import torch.nn as nn

from .gate import Gate
from .gate_state import gates

__all__ = ['force_gates']

ForcedMasks = Union[str, Mapping[str, Any]]


@contextmanager
def force_gates(model: nn.Module, masks: ForcedMasks) -> Iterator[nn.Module]:
    """Force the gates of a model within a context, in training and in evaluation.

    Args:
        model: A model with gates.
        masks: 'open', 'closed', or a mapping from gate names (see `gates`) to masks of 0s and 1s, each [num_gates] or
            [N, num_gates]. Gates missing from the mapping are not forced.

    Examples:
        >>> with force_gates(model, 'open'):
        >>>     dense_output = model(images)
    """
    named_gates = dict(gates(model))
    if not named_gates and masks != 'open':  # a dense network is always open
        raise ValueError(f'this {type(model).__name__} has no gates to force.')
    forced = _resolve_masks(named_gates, masks)
    before = {name: gate.forced for name, gate in named_gates.items()}
    try:
        for name, mask in forced.items():
            named_gates[name].forced = mask
        yield model
    finally:
        for name, gate in named_gates.items():
            gate.forced = before[name]


def _resolve_masks(named_gates: Dict[str, Gate], masks: ForcedMasks) -> Dict[str, torch.Tensor]:
    if isinstance(masks, str):
        if masks not in ('open', 'closed'):
            raise ValueError(f"gates can be forced 'open', 'closed' or to a mapping of masks, got '{masks}'.")
        value = float(masks == 'open')
        return {name: torch.full((gate.num_gates,), value) for name, gate in named_gates.items()}
    if not isinstance(masks, Mapping):
        raise ValueError(
            f"gates can be forced 'open', 'closed' or to a mapping of gate names to masks, "
            f'got a {type(masks).__name__}.')
    resolved = {}
    for name, mask in masks.items():
        if name not in named_gates:
            raise ValueError(f"the model has no gate '{name}'; its gates: {', '.join(named_gates) or 'none'}.")
        mask = torch.as_tensor(mask)
        num_gates = named_gates[name].num_gates
        if mask.ndim not in (1, 2) or mask.shape[-1] != num_gates:
            raise ValueError(
                f"the mask of gate '{name}' has shape {tuple(mask.shape)}; allowed are ({num_gates},) and "
                f'(N, {num_gates}).')
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"the mask of gate '{name}' must hold only 0 and 1, or booleans.")
        resolved[name] = mask.to(torch.float32, copy=True)
    return resolved
