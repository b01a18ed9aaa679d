"""Smaller networks from trained gates"""
from .filters import without_gates
from .prune import Pruned, check_classes, check_repeatable, prune_static, prune_with, specialize

__all__ = [
    'Pruned',
    'check_classes',
    'check_repeatable',
    'prune_static',
    'prune_with',
    'specialize',
    'without_gates',
]
