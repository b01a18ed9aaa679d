"""Channel-gated networks for mmsegmentation: a thin adapter over `timm_gated`

Importing this package (`custom_imports` in a config) registers its classes with mmseg. It does not affect models
without gates.
"""
from timm_gated.version import __version__ as __version__

from . import compat  # noqa: F401, I001  (must precede all imports of mmseg)
from . import heads as _heads  # noqa: F401  (registers the compilation of decode heads)
from . import int8 as _int8  # noqa: F401  (registers the batches of mmseg's loaders)
from .backbones import GatedResNet, GatedResNetV1c, GatedResNetV1d, GatedResNeXt, SlimResNet, SlimResNeXt
from .checkpoints import WholeFileBackend, load_from_safetensors, load_from_timm_gated
from .datasets import CamVidDataset
from .distillation import DistillationLoss
from .hooks import GateLossScheduleHook, GateNoiseScheduleHook, GateStatisticsHook
from .losses import BatchShapingLoss, FeatureShapingLoss, L0Loss, MACBudgetLoss
from .metrics import MACsMetric
from .segmentors import GatedCascadeEncoderDecoder, GatedEncoderDecoder
from .timm_backbone import TimmGatedBackbone

__all__ = [
    'BatchShapingLoss',
    'CamVidDataset',
    'DistillationLoss',
    'FeatureShapingLoss',
    'GateLossScheduleHook',
    'GateNoiseScheduleHook',
    'GateStatisticsHook',
    'GatedCascadeEncoderDecoder',
    'GatedEncoderDecoder',
    'GatedResNeXt',
    'GatedResNet',
    'GatedResNetV1c',
    'GatedResNetV1d',
    'L0Loss',
    'MACBudgetLoss',
    'MACsMetric',
    'SlimResNeXt',
    'SlimResNet',
    'TimmGatedBackbone',
    'WholeFileBackend',
    'load_from_safetensors',
    'load_from_timm_gated',
]
