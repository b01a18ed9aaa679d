"""Gate losses as mmsegmentation losses

Registered wrappers of `timm_gated`'s loss functions with OpenMMLab's `loss_weight` and `loss_name`. They are listed in
`gate_losses` of a gated segmentor (`mmseg_plugin.segmentors`), which adds them to its own losses.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
from typing import Any, Dict, Mapping, Optional

import torch
import torch.nn as nn
from mmseg.registry import MODELS

from timm_gated.layers import gate_logits
from timm_gated.loss import FeatureShaping, MacBudget, Step, batch_shaping_loss, check_reduction, create_prior, l0_loss
from timm_gated.utils import check_number, gather_batch

__all__ = ['BatchShapingLoss', 'FeatureShapingLoss', 'GateLoss', 'L0Loss', 'MACBudgetLoss']


class GateLoss(nn.Module):
    """Base class of gate losses.

    Args:
        loss_weight: Weight of the loss; a `GateLossScheduleHook` changes it during training.
        loss_name: Key in the log. It must contain 'loss' to be part of the total.
    """

    gather_gates: bool = False
    needs_logits: bool = False  # whether `step.output` must hold the logits of the decode head

    def __init__(self, loss_weight: float, loss_name: str) -> None:
        super().__init__()
        self.loss_weight = check_number(loss_weight, 'loss_weight', minimum=0)
        if 'loss' not in loss_name:
            raise ValueError(f"loss_name must contain 'loss' to be part of mmengine's total, got '{loss_name}'.")
        self.loss_name = loss_name

    def attach(self, model: nn.Module) -> None:
        """Attach the loss to the segmentor, once it is built."""

    def value(self, model: nn.Module, step: Optional[Step]) -> torch.Tensor:
        """Unweighted loss of the last forward pass.

        Args:
            model: The segmentor.
            step: Its preprocessed images, the logits of its decode head (None unless `needs_logits`) and data samples.
        """
        raise NotImplementedError

    def stats(self) -> Dict[str, torch.Tensor]:
        """Additional values to log."""
        return {}

    def forward(self, model: nn.Module, step: Optional[Step] = None) -> torch.Tensor:
        has_parameters = any(p.requires_grad for p in self.parameters())  # DDP waits for their gradients
        if not self.loss_weight and not has_parameters:
            return next(model.parameters()).new_zeros(())
        return self.loss_weight * self.value(model, step)


class _LogitLoss(GateLoss):
    """Base class of losses on the log-odds of all gates.

    Args:
        loss_weight: Weight of the loss.
        gather_gates: Whether distributed training computes the loss over the batches of all processes.
        loss_name: Key in the log.
    """

    def __init__(self, loss_weight: float, gather_gates: bool, loss_name: str) -> None:
        super().__init__(loss_weight, loss_name)
        self.gather_gates = gather_gates

    def logits(self, model: nn.Module) -> torch.Tensor:
        """Log-odds of all gates, of shape [N, gates]."""
        logits = gate_logits(model)
        return gather_batch(logits) if self.gather_gates and self.training else logits


@MODELS.register_module()
class BatchShapingLoss(_LogitLoss):
    """Batch shaping over all gates of a segmentor.

    Args:
        loss_weight: Weight of the loss, the paper's lambda.
        prior: Prior of each gate: a name, or a dict with its `type`.
        reduction: 'sum' (the paper's text) or 'mean' over the gates.
        loss_name: Key in the log.
        gather_gates: Whether distributed training computes the loss over the batches of all processes. By default each
            process uses its own batch, as in the paper.
    """

    def __init__(
            self,
            loss_weight: float = 1.,
            prior: Any = 'beta',
            reduction: str = 'sum',
            loss_name: str = 'loss_batch_shaping',
            gather_gates: bool = False,
    ) -> None:
        super().__init__(loss_weight, gather_gates, loss_name)
        self.prior = create_prior(prior)
        self.reduction = check_reduction(reduction, ('sum', 'mean'))

    def value(self, model: nn.Module, step: Optional[Step]) -> torch.Tensor:
        return batch_shaping_loss(torch.sigmoid(self.logits(model)), self.prior, self.reduction)


@MODELS.register_module()
class L0Loss(_LogitLoss):
    """L0 over all gates of a segmentor.

    Args:
        loss_weight: Weight of the loss, the paper's gamma.
        reduction: 'mean' or 'sum' (the paper's formula) over the gates.
        loss_name: Key in the log.
        gather_gates: Whether distributed training computes the loss over the batches of all processes. This makes a
            difference only if their sizes differ.
    """

    def __init__(
            self,
            loss_weight: float = 1.,
            reduction: str = 'mean',
            loss_name: str = 'loss_l0',
            gather_gates: bool = False,
    ) -> None:
        super().__init__(loss_weight, gather_gates, loss_name)
        self.reduction = check_reduction(reduction, ('sum', 'mean'))

    def value(self, model: nn.Module, step: Optional[Step]) -> torch.Tensor:
        return l0_loss(self.logits(model), self.reduction)


@MODELS.register_module()
class MACBudgetLoss(GateLoss):
    """A budget for the mean MACs of a batch, as a share of those of the dense segmentor, decode head included.

    Args:
        budget: Target share, above 0 and at most 1.
        loss_weight: Weight of the squared difference from the budget.
        loss_name: Key in the log.
        gather_gates: Whether distributed training computes the mean over the batches of all processes.
    """

    def __init__(
            self,
            budget: float = 0.5,
            loss_weight: float = 10.,
            loss_name: str = 'loss_mac_budget',
            gather_gates: bool = False,
    ) -> None:
        super().__init__(loss_weight, loss_name)
        self.objective = MacBudget(budget)
        self.gather_gates = self.objective.gather_gates = gather_gates

    def value(self, model: nn.Module, step: Optional[Step]) -> torch.Tensor:
        return self.objective.terms(model, 0, step)['budget_loss'].value

    def stats(self) -> Dict[str, torch.Tensor]:
        return self.objective.stats(None)


@MODELS.register_module()
class FeatureShapingLoss(GateLoss):
    """Batch shaping of the features of any modules of a segmentor.

    Args:
        priors: Mapping from names of modules, such as `backbone.layer3`, to priors.
        loss_weight: Weight of the loss.
        reduction: 'mean' or 'sum' over the channels of each feature; features are summed.
        channel_dim: Dimension of the channels; 1 by default, -1 for tokens [N, L, C].
        loss_name: Key in the log.
    """

    def __init__(
            self,
            priors: Mapping[str, Any],
            loss_weight: float = 1.,
            reduction: str = 'mean',
            channel_dim: Optional[int] = None,
            loss_name: str = 'loss_feature_shaping',
    ) -> None:
        super().__init__(loss_weight, loss_name)
        self.priors = dict(priors)
        self.channel_dim = channel_dim
        self.reduction = check_reduction(reduction, ('sum', 'mean'))
        self.shaping: Optional[FeatureShaping] = None

    def attach(self, model: nn.Module) -> None:
        self.shaping = FeatureShaping(model, self.priors, reduction=self.reduction, channel_dim=self.channel_dim)

    def value(self, model: nn.Module, step: Optional[Step]) -> torch.Tensor:
        assert self.shaping is not None
        return self.shaping.terms(model, 0)['feature_shaping_loss'].value
