"""Checkpoints of gated models in timm's training

timm replaces its last checkpoint in two steps, and a process killed between them leaves none. For gated models the
replacement is atomic. Errors about a truncated checkpoint get a note with its name and the complete checkpoints in its
folder.
"""
import functools
import inspect
import sys
from typing import Any, Callable

import timm.task  # noqa: F401  (patched below, by module name)
import torch.nn as nn
from timm.utils import CheckpointSaver

from ..layers import gates
from ..loss import objectives
from ..utils import cut_explained, on_first_use, sync_file

__all__ = ['protect_timm_checkpoints']


def _explain_load(load: Callable) -> Callable:
    """Wrap a function that loads the checkpoint at its first argument, to add notes to its errors."""
    name = next(iter(inspect.signature(load).parameters))

    @functools.wraps(load)
    def load_explained(*args: Any, **kwargs: Any) -> Any:
        with cut_explained(args[0] if args else kwargs.get(name)):
            return load(*args, **kwargs)
    return load_explained


def _replace_in_one_step(replace: Callable) -> Callable:
    """Wrap `CheckpointSaver._replace` to keep the last checkpoint of a gated model until the next one is complete."""

    @functools.wraps(replace)
    def replace_gated(self: CheckpointSaver, src: str, dst: str) -> None:
        trained = (getattr(self, name, None) for name in ('model', 'task'))
        if not any(gates(module) or objectives(module) for module in trained if isinstance(module, nn.Module)):
            return replace(self, src, dst)
        sync_file(src)
        can_hardlink, self.can_hardlink = self.can_hardlink, False  # with hard links, timm deletes the target first
        try:
            return replace(self, src, dst)
        finally:
            self.can_hardlink = can_hardlink
    return replace_gated


@on_first_use
def protect_timm_checkpoints() -> None:
    """Make timm keep the last checkpoint of a gated model until the next one is complete, and explain truncated ones.

    Creating the first gate or objective calls this. The patched names are internal to timm; missing ones are skipped.
    """
    if hasattr(CheckpointSaver, '_replace'):
        CheckpointSaver._replace = _replace_in_one_step(CheckpointSaver._replace)  # type: ignore[method-assign]
    for load, modules in (
            ('_load_train_checkpoint', ['timm.task._helpers']),  # --resume
            ('load_state_dict', ['timm.models', 'timm.models._helpers', 'timm.models._builder', 'timm.models._hub'])):
        for module in map(sys.modules.get, modules):
            if hasattr(module, load):
                setattr(module, load, _explain_load(getattr(module, load)))
