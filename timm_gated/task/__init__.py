"""Gate losses, MACs and checkpoints in timm's training"""
from .checkpoint_saver import protect_timm_checkpoints
from .objective_task import ObjectiveTask, extend_timm_tasks

__all__ = [
    'ObjectiveTask',
    'extend_timm_tasks',
    'protect_timm_checkpoints',
]
