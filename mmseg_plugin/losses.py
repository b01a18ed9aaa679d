"""Gate losses as mmsegmentation losses

Thin registered wrappers over `timm_gated`'s pure functions, with OpenMMLab's `loss_weight` and `loss_name`. They are
listed under `gate_losses` of a gated segmentor (`mmseg_plugin.segmentors`), which calls them after its own losses.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
from typing import Any, Mapping, Optional

import torch
import torch.nn as nn
from mmseg.registry import MODELS

from timm_gated.layers import gate_logits
from timm_gated.loss import FeatureShaping, batch_shaping_loss, check_reduction, create_prior, l0_loss
from timm_gated.utils import check_number, gather_batch

__all__ = ['BatchShapingLoss', 'FeatureShapingLoss', 'L0Loss']


class _GateLoss(nn.Module):
    """Base of the wrappers.

    Args:
        loss_weight: Weight of the loss; a `GateLossScheduleHook` changes it during training.
        loss_name: Its key in the log, which must contain 'loss' to be part of the total.
    """

    gather_gates: bool = False

    def __init__(self, loss_weight: float, loss_name: str) -> None:
        super().__init__()
        self.loss_weight = check_number(loss_weight, 'loss_weight', minimum=0)
        if 'loss' not in loss_name:
            raise ValueError(f"loss_name must contain 'loss', to be part of mmengine's total, got '{loss_name}'.")
        self.loss_name = loss_name

    def attach(self, model: nn.Module) -> None:
        """Get to know the segmentor, once it is built."""

    def value(self, model: nn.Module) -> torch.Tensor:
        """The loss before its weight, from the model's last forward pass."""
        raise NotImplementedError

    def forward(self, model: nn.Module) -> torch.Tensor:
        learns = any(p.requires_grad for p in self.parameters())  # DDP waits for their gradients
        if not self.loss_weight and not learns:
            return next(model.parameters()).new_zeros(())
        return self.loss_weight * self.value(model)


class _LogitLoss(_GateLoss):
    """Base of the losses on the log-odds of all gates.

    Args:
        loss_weight: Weight of the loss.
        gather_gates: In a training on several processes, compute the loss over the gates of all of them.
        loss_name: Key in the log.
    """

    def __init__(self, loss_weight: float, gather_gates: bool, loss_name: str) -> None:
        super().__init__(loss_weight, loss_name)
        self.gather_gates = gather_gates

    def logits(self, model: nn.Module) -> torch.Tensor:
        """Log-odds of all gates, [N, gates]."""
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
        gather_gates: In a training on several processes, compute the loss over the batch of all of them, as one
            process with the whole batch would. By default it is each process's own, as in the paper.
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

    def value(self, model: nn.Module) -> torch.Tensor:
        return batch_shaping_loss(torch.sigmoid(self.logits(model)), self.prior, self.reduction)


@MODELS.register_module()
class L0Loss(_LogitLoss):
    """L0 over all gates of a segmentor.

    Args:
        loss_weight: Weight of the loss, the paper's gamma.
        reduction: 'mean' or 'sum' (the paper's formula) over the gates.
        loss_name: Key in the log.
        gather_gates: As for batch shaping. L0 is a mean: it makes a difference only where processes have batches of
            different sizes.
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

    def value(self, model: nn.Module) -> torch.Tensor:
        return l0_loss(self.logits(model), self.reduction)


@MODELS.register_module()
class FeatureShapingLoss(_GateLoss):
    """Batch shaping of any features of a segmentor.

    Args:
        priors: From names of the segmentor's modules, such as `backbone.layer3`, to priors.
        loss_weight: Weight of the loss.
        reduction: 'mean' or 'sum' over the channels of a feature; features are summed.
        channel_dim: Dimension of the channels; the second of a map by default.
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

    def value(self, model: nn.Module) -> torch.Tensor:
        assert self.shaping is not None
        return self.shaping.terms(model, 0)['feature_shaping_loss'].value
