"""Checkpoints that a killed training leaves

A process that is killed, or runs out of disk, while it writes leaves a part of a file. torch and safetensors never take
a part for the whole, but what they say of it ('Invalid argument', 'retry with weights_only=False') neither names the
file nor helps. Once this package is imported, timm's scripts name the file, and the whole ones that lie beside it.

timm replaces its last checkpoint in two steps, and a process killed between them leaves none; here it is one step.
"""
import functools
import inspect
import os
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, List, Union

import timm.task  # noqa: F401  (it is patched, by its modules' names)
from safetensors import SafetensorError, safe_open
from timm.utils import CheckpointSaver

from .files import explained, replace_file

__all__ = ['explain_load', 'is_cut', 'others_beside', 'protect_timm_checkpoints', 'whole_checkpoints']

_START = b'PK\x03\x04'  # of a file of torch.save, which is a zip archive; its end has the list of what is inside


def is_cut(path: Union[str, Path]) -> bool:
    """Whether a checkpoint of torch or safetensors ends too early. (Of torch's format before 1.6 one cannot tell.)"""
    if _is_whole(path):
        return False
    with open(path, 'rb') as file:
        return str(path).endswith('.safetensors') or _START.startswith(file.read(len(_START)))


def _is_whole(path: Union[str, Path]) -> bool:
    if not str(path).endswith('.safetensors'):
        return zipfile.is_zipfile(path)
    try:
        with safe_open(path, 'pt'):
            return True
    except SafetensorError:
        return False


def whole_checkpoints(folder: Union[str, Path], suffix: str) -> List[Path]:
    """Checkpoints in a folder that are whole, the newest first."""
    found = []
    for path in Path(folder).glob(f'[!.]*{suffix}'):  # (hidden files are those that are being written)
        with suppress(OSError):  # gone meanwhile, or not for this user to read
            if path.is_file() and _is_whole(path):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def others_beside(path: Union[str, Path], advice: str) -> str:
    """For an error over a checkpoint that is of no use: the whole ones beside it, and what to do with them."""
    others = [other.name for other in whole_checkpoints(Path(path).parent, Path(path).suffix)[:5]]
    if others:
        return f'Whole checkpoints beside it, the newest first: {", ".join(others)}. {advice}.'
    return 'There is no whole checkpoint beside it: fetch it again, or begin anew.'


def explain_load(load: Callable, advice: str = 'Take one of them instead') -> Callable:
    """A function that loads a checkpoint, with errors that name the file, and help where it is cut short.

    Args:
        load: Loads the checkpoint whose path is its first argument.
        advice: What to do with the whole checkpoints beside one that is cut short.
    """
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_explained(*args: Any, **kwargs: Any) -> Any:
        path = next(iter(signature.bind(*args, **kwargs).arguments.values()))
        try:
            with explained(f'{path} cannot be loaded'):
                return load(*args, **kwargs)
        except Exception as error:
            if not os.path.isfile(path) or not is_cut(path):
                raise
            raise ValueError(
                f'{path} is cut short: whatever wrote it was killed, or the disk was full. Nothing of it was loaded. '
                f'{others_beside(path, advice)}') from error
    return load_explained


def _replace(self: CheckpointSaver, src: str, dst: str) -> None:
    replace_file(src, dst)


@functools.cache
def protect_timm_checkpoints() -> None:
    """Make timm keep its last checkpoint until the next is there, and explain those that do not load.

    Importing `timm_gated` does it. The names are timm's own, not its interface: one that is gone is left alone.
    """
    if hasattr(CheckpointSaver, '_replace'):
        CheckpointSaver._replace = _replace  # type: ignore[method-assign]
    for load, modules in (
            ('_load_train_checkpoint', ['timm.task._helpers']),  # --resume
            ('load_state_dict', ['timm.models', 'timm.models._helpers', 'timm.models._builder', 'timm.models._hub'])):
        for module in map(sys.modules.get, modules):
            if hasattr(module, load):
                setattr(module, load, explain_load(getattr(module, load)))
