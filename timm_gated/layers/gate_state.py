"""What the gates of a model decided in its last forward pass"""
from typing import Dict, List, Tuple

import torch
import torch.nn as nn

from ..utils import average_batches
from .gate import Gate, gates

__all__ = ['gate_density', 'gate_logits', 'gate_masks', 'gate_scores']


def gate_density(model: nn.Module, gather: bool = False) -> Dict[str, torch.Tensor]:
    """Share of the gates that were open in the last forward pass (soft ones in part), and would be in evaluation.

    Args:
        model: A model with gates.
        gather: Over the batch of all processes, which then all have to ask.
    """
    last = _last(model)
    if not last:
        return {}
    masks = torch.cat([gate.mask.detach() for gate, _ in last], dim=1)  # type: ignore[union-attr]
    in_evaluation = torch.cat([gate.decide(logits.detach()) for gate, logits in last], dim=1)
    shares = torch.stack((masks.mean(), in_evaluation.mean()))
    if gather:
        shares = average_batches(shares, len(masks))
    return dict(zip(('gate_density', 'gate_density_eval'), shares.unbind(), strict=True))


def gate_logits(model: nn.Module) -> torch.Tensor:
    """The last log-odds of all gates, [N, gates]. Gates that score otherwise are refused."""
    for _, gate in gates(model):
        if not gate.log_odds:
            raise ValueError(
                f'{type(gate).__name__} does not give log-odds, which losses on the probabilities of gates (batch '
                f'shaping, L0) need.')
    return gate_scores(model)


def gate_scores(model: nn.Module) -> torch.Tensor:
    """What all gates last decided from, be it log-odds or saliencies, [N, gates]."""
    return torch.cat([logits for _, logits in _last(model)], dim=1)


def gate_masks(model: nn.Module) -> Dict[str, torch.Tensor]:
    """The last masks of all gates by name, [N, num_gates] each, with the gradient that they train by."""
    _last(model)
    return {name: gate.mask for name, gate in gates(model) if gate.mask is not None}


def _last(model: nn.Module) -> List[Tuple[Gate, torch.Tensor]]:
    """All gates with the logits of their last input, which is there and can be trained on."""
    last = []
    for name, gate in gates(model):
        if gate.logits is None:
            raise RuntimeError(f"gate '{name}' has seen no input: run the model before its gate losses.")
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in gate.parameters())
        if trains and not gate.logits.requires_grad:
            raise RuntimeError(
                f"the logits of gate '{name}' carry no gradient, so its losses would not train it. If the model is "
                f'checkpointed, use use_reentrant=False.')
        last.append((gate, gate.logits))
    return last
