"""Batch shaping of features of any network

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
import difflib
from typing import Any, Dict, List, Mapping, Optional

import torch
import torch.nn as nn

from ..utils import check_number
from .gate_losses import batch_shaping_loss, check_reduction
from .objective import Objective, PriorSpec, Step, Term
from .priors import Prior, create_prior
from .schedules import Epochs, Scheduled, check_epochs, linear_anneal

__all__ = ['FeatureShaping', 'gate_prior', 'shape_features']


def gate_prior(model: nn.Module) -> Optional[Prior]:
    """Prior of the gates of a model; None if the model has no batch shaping of gates."""
    for module in model.modules():
        prior = getattr(module, 'prior', None)
        if isinstance(prior, Prior) and not isinstance(module, _FeatureTap):
            return prior
    return None


class _FeatureTap(nn.Module):
    """Stores the last training output of one module, and the prior for it."""

    def __init__(self, name: str, prior: Prior, channel_dim: Optional[int]) -> None:
        super().__init__()
        self.name = name
        self.prior = prior
        self.channel_dim = channel_dim
        self.feature: Optional[torch.Tensor] = None

    def record(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.training:
            return
        if not isinstance(output, torch.Tensor) or output.ndim < 2:
            what = f'shape {tuple(output.shape)}' if isinstance(output, torch.Tensor) else type(output).__name__
            raise ValueError(f"feature '{self.name}' must be one tensor of two dimensions or more, got {what}.")
        self.feature = output.clone()  # later layers may work in place

    def loss(self, reduction: str) -> torch.Tensor:
        """Batch-shaping loss over the channels. As in batch normalisation, the positions of a map are samples."""
        if self.feature is None:
            raise RuntimeError(f"feature '{self.name}' has seen no input: train the model before its shaping loss.")
        feature, self.feature = self.feature, None
        channel_dim = self.channel_dim
        if channel_dim is None:
            channel_dim = -1 if feature.ndim == 3 else 1  # tokens [N, L, C], or maps [N, C, H, W]
        return batch_shaping_loss(feature.movedim(channel_dim, -1).flatten(0, -2), self.prior, reduction)

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, 'feature': None}


class FeatureShaping(Objective):
    """Batch shaping of named features of any network. Created by `shape_features`, with the same arguments.

    Each process shapes the features of its own batch: feature maps are large to gather, and have enough positions.
    """

    def __init__(
            self,
            model: nn.Module,
            priors: Mapping[str, PriorSpec],
            weight: float = 1.,
            epochs: Epochs = 'fixed',
            reduction: str = 'mean',
            channel_dim: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.weight = check_number(weight, 'weight', minimum=0)
        self.epochs = check_epochs(epochs, 'epochs')
        self.reduction = check_reduction(reduction, ('sum', 'mean'))
        modules = dict(model.named_modules())
        for name in priors:
            if name not in modules:
                near = difflib.get_close_matches(name, modules, n=3)
                raise ValueError(
                    f"the model has no module '{name}' to shape; similar names: {', '.join(near) or 'none'}. "
                    f'See model.named_modules().')
        taps = [_FeatureTap(name, create_prior(spec), channel_dim) for name, spec in priors.items()]
        self.taps = nn.ModuleList(taps)
        self._handles = [modules[tap.name].register_forward_hook(tap.record) for tap in taps]

    def extra_repr(self) -> str:
        return f'weight={self.weight}, epochs={self.epochs}, reduction={self.reduction}'

    def schedule(self) -> List[Scheduled]:
        last = self.weight if self.epochs == 'fixed' else 0.
        return [Scheduled('feature_shaping_loss', 'weight', self.weight, last, self.epochs)]

    def terms(self, model: Any, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        weight = self.weight if self.epochs == 'fixed' else linear_anneal(epoch, self.weight, *self.epochs)
        losses = [tap.loss(self.reduction) for tap in self.taps]  # type: ignore[operator]
        if not losses:
            return {}
        return {'feature_shaping_loss': Term(torch.stack(losses).sum(), weight, 'feature_shaping_weight')}

    def remove(self) -> None:
        """Remove the hooks. From then on there is no loss term."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.taps = nn.ModuleList()


def shape_features(
        model: nn.Module,
        priors: Mapping[str, PriorSpec],
        weight: float = 1.,
        epochs: Epochs = 'fixed',
        reduction: str = 'mean',
        channel_dim: Optional[int] = None,
) -> FeatureShaping:
    """Shape features of any network, by the names of the modules that output them.

    When one of timm's tasks trains the model, each channel of a feature is driven towards its prior over the batch and
    the positions of a map. The objective becomes the model's child `feature_shaping`; a second call replaces it. The
    state dict has the parameters of learnable priors under that name.

    Args:
        model: The network.
        priors: Priors by module name: objects, names, or dicts with their `type`.
        weight: Weight of the loss.
        epochs: Epochs over which the weight is annealed linearly to zero, or 'fixed'.
        reduction: 'mean' or 'sum' over the channels of a feature; features are summed.
        channel_dim: Dimension of the channels; by default the last one for tokens [N, L, C], and otherwise the second.
            Use -1 for maps with channels last.

    Examples:
        >>> shape_features(timm.create_model('resnet18'), {'layer3.1.act1': Normal()}, weight=0.1)
    """
    shaping = FeatureShaping(model, priors, weight, epochs, reduction, channel_dim)
    previous = getattr(model, 'feature_shaping', None)
    if isinstance(previous, FeatureShaping):
        previous.remove()
    model.feature_shaping = shaping
    return shaping
