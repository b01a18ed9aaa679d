"""Any timm network with batch-shaped features, as a timm model

The gating paper offers batch shaping as a general tool: a Gaussian prior in the role of batch normalisation, a uniform
one for quantisation. This entry point makes it available to configs of the stock training script:

    model: batch_shaped
    model_kwargs: {network: resnet18, features: {layer3.1.act1: normal}, weight: 0.1}

In Python, `timm_gated.shape_features(model, …)` does the same to a model at hand.
"""
from typing import Any, Mapping, Optional

import timm
import torch.nn as nn
from timm.models import register_model

from ..loss import shape_features
from ._config import check_entry_args

__all__: list = []


@register_model
def batch_shaped(
        pretrained: bool = False,
        network: str = 'resnet18',
        features: Optional[Mapping[str, Any]] = None,
        weight: float = 1.,
        epochs: Any = 'fixed',
        reduction: str = 'mean',
        channel_dim: Optional[int] = None,
        **kwargs,
) -> nn.Module:
    """Constructs another timm model, some of whose features are shaped in training.

    Args:
        pretrained: Load pretrained weights of the network.
        network: Name of the timm model.
        features: From names of its modules to priors; see `shape_features`, also for the other options.
        weight: Weight of the loss.
        epochs: Epochs over which the weight is annealed, or 'fixed'.
        reduction: Over the channels of a feature.
        channel_dim: Dimension of the channels of a feature.
        **kwargs: Of the network.
    """
    if not features:
        raise ValueError("batch_shaped needs `features`, such as {'layer3.1.act1': 'normal'}, got none.")
    check_entry_args(kwargs)
    model: Any = timm.create_model(network, pretrained=pretrained, **kwargs)
    shape_features(model, features, weight, epochs, reduction, channel_dim)
    model.pretrained_cfg['architecture'] = 'batch_shaped'  # by which a saved config makes it again
    return model
