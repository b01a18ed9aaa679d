"""Smaller and cheaper networks from trained gates"""
from .calibrate import Calibrated, calibrate, calibrate_with
from .filters import without_gates
from .prune import Pruned, check_classes, check_repeatable, prune_static, prune_with, specialize

__all__ = [
    'Calibrated',
    'Pruned',
    'calibrate',
    'calibrate_with',
    'check_classes',
    'check_repeatable',
    'prune_static',
    'prune_with',
    'specialize',
    'without_gates',
]
