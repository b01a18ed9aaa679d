"""Losses on gates: batch shaping and L0

Batch shaping drives each gate's distribution over the batch towards a prior, so that the gate depends on the input
instead of being always on or always off. The L0 loss is the expected number (or share) of open gates.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The paper's text sums batch shaping over the gates, and its authors' loss release takes the mean, which changes the
weight by the number of gates; `reduction` selects either. The paper's pseudo-code omits the 1/N of its equation, which
is kept here.
"""
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..utils import full_precision, widen
from .priors import Prior, create_prior

__all__ = ['BatchShapingLoss', 'L0Loss', 'batch_shaping_loss', 'check_reduction', 'l0_loss']


def batch_shaping_loss(
        x: torch.Tensor,
        prior: Prior | str | Mapping[str, Any] = 'beta',
        reduction: str = 'sum',
) -> torch.Tensor:
    """Squared distance (Cramer-von Mises) between the distribution of each gate over the batch and a prior.

    For each gate, with its N values sorted: the mean over i of (i / (N + 1) - CDF(x_i))^2. Computed in float32 (or
    float64, if `x` is).

    Args:
        x: Gates (sigmoid of the logits, without noise) or any other feature, [N, gates].
        prior: Prior of every gate: an object, a name, or a mapping with its `type`; 'beta' is the paper's
            Beta(0.6, 0.4).
        reduction: Over the gates: 'sum', 'mean' or 'none'.
    """
    check_reduction(reduction)
    _check_shape('x', x)
    with full_precision(x):
        x = widen(x)
        # The paper sorts forward and undoes it backward. Targets by rank are equivalent and need no backward.
        targets = _ranks(x.detach()) / (x.shape[0] + 1)
        loss = F.mse_loss(create_prior(prior).cdf(x), targets, reduction='none').mean(dim=0)
        return _reduce(loss, reduction)


def l0_loss(logits: torch.Tensor, reduction: str = 'mean') -> torch.Tensor:
    """Expected share of the batch for which each gate is open, sigmoid(logit). Computed in float32 (or float64).

    Args:
        logits: Log-odds of the gates being open, [N, gates].
        reduction: Over the gates: 'mean', 'sum' or 'none'.
    """
    check_reduction(reduction)
    _check_shape('logits', logits)
    with full_precision(logits):
        return _reduce(torch.sigmoid(widen(logits)).mean(dim=0), reduction)


class BatchShapingLoss(nn.Module):
    """`batch_shaping_loss` as a module, which holds the prior and its parameters.

    Args:
        prior: Prior of every gate: an object, a name, or a mapping with its `type`.
        reduction: Over the gates: 'sum', 'mean' or 'none'.
    """

    def __init__(self, prior: Prior | str | Mapping[str, Any] = 'beta', reduction: str = 'sum') -> None:
        super().__init__()
        self.prior = create_prior(prior)
        self.reduction = check_reduction(reduction)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return batch_shaping_loss(x, self.prior, self.reduction)

    def extra_repr(self) -> str:
        return f'reduction={self.reduction}'


class L0Loss(nn.Module):
    """`l0_loss` as a module.

    Args:
        reduction: Over the gates: 'mean', 'sum' or 'none'.
    """

    def __init__(self, reduction: str = 'mean') -> None:
        super().__init__()
        self.reduction = check_reduction(reduction)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return l0_loss(logits, self.reduction)

    def extra_repr(self) -> str:
        return f'reduction={self.reduction}'


def check_reduction(reduction: str, allowed: Sequence[str] = ('none', 'sum', 'mean')) -> str:
    """Validate the name of a reduction and return it."""
    if reduction not in allowed:
        raise ValueError(f'reduction must be one of {list(allowed)}, got {reduction!r}.')
    return reduction


def _check_shape(name: str, x: torch.Tensor) -> None:
    if x.ndim != 2 or x.numel() == 0:
        raise ValueError(f'{name} must be [N, gates] with at least one sample and one gate, got {list(x.shape)}.')


def _ranks(x: torch.Tensor) -> torch.Tensor:
    """Ranks from 1 to N along the first dimension, as floats."""
    order = x.t().contiguous().argsort(dim=1)  # on a CPU, sort and scatter are fastest along rows
    ranks = torch.arange(1, x.shape[0] + 1, dtype=x.dtype, device=x.device).expand_as(order)
    return torch.empty_like(ranks).scatter_(1, order, ranks).t().contiguous()


def _reduce(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == 'none':
        return loss
    return loss.sum() if reduction == 'sum' else loss.mean()
