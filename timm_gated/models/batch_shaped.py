"""Any timm model with batch-shaped features

The gating paper proposes batch shaping as a general tool, for example a Gaussian prior in place of batch normalization,
or a uniform prior for quantization. This entry point makes it available to configs of timm's training script:

    model: batch_shaped
    model_kwargs: {network: resnet18, features: {layer3.1.act1: normal}, weight: 0.1}

In Python, use `timm_gated.shape_features(model, …)`.
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
    """Constructs another timm model with batch shaping of some of its features.

    Args:
        pretrained: Load pretrained weights of the network.
        network: Name of the timm model.
        features: Priors by module name, see `shape_features`.
        weight: Weight of the loss.
        epochs: Epochs over which the weight is annealed, or 'fixed'.
        reduction: Reduction over the channels of a feature, 'mean' or 'sum'.
        channel_dim: Dimension of the channels of a feature.
        **kwargs: Options of the network.
    """
    if not features:
        raise ValueError("batch_shaped needs `features`, such as {'layer3.1.act1': 'normal'}, got none.")
    check_entry_args(kwargs)
    model: Any = timm.create_model(network, pretrained=pretrained, **kwargs)
    shape_features(model, features, weight, epochs, reduction, channel_dim)
    model.pretrained_cfg['architecture'] = 'batch_shaped'  # so that a saved config builds this entry point
    return model
