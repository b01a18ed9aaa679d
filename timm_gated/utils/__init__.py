"""Helpers that do not depend on gates: option checks, files, precision, distributed training"""
from .checkpoints import cut_explained, others_beside
from .checks import check_number
from .distributed import average_batches, gather_batch
from .files import check_new, explained, new_file, new_folder, sync_file
from .installation import install, on_first_use
from .model import evaluation_mode, unwrap
from .precision import autocasts, check_floating, full_precision, widen

__all__ = [
    'autocasts',
    'average_batches',
    'check_floating',
    'check_new',
    'check_number',
    'cut_explained',
    'evaluation_mode',
    'explained',
    'full_precision',
    'gather_batch',
    'install',
    'new_file',
    'new_folder',
    'on_first_use',
    'others_beside',
    'sync_file',
    'unwrap',
    'widen',
]
