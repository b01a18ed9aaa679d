"""Calibration images of int8 segmentors, from mmseg's loaders

    loader = Runner.build_dataloader(cfg.val_dataloader)
    fast = timm_gated.accelerate(segmentor, precision='int8', calibration=loader)

A training loader of mmseg has no end; `itertools.islice(loader, 50)` takes 50 batches.
"""
from typing import Any

import torch
import torch.nn as nn
from mmseg.models.segmentors import BaseSegmentor

from timm_gated.inference import batch_images

__all__: list = []

_default_images = batch_images.dispatch(nn.Module)


@batch_images.register
def _(model: BaseSegmentor, batch: Any) -> torch.Tensor:
    """Preprocess a batch of mmseg's loaders as in inference."""
    return model.data_preprocessor(batch)['inputs'] if isinstance(batch, dict) else _default_images(model, batch)
