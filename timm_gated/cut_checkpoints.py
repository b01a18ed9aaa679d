"""Checkpoints that a killed training leaves

A process that is killed, or runs out of disk, while it writes leaves a part of a file. torch and safetensors never take
a part for the whole, but what they say of it ('Invalid argument', 'retry with weights_only=False') neither names the
file nor helps. Once this package is imported, timm's scripts name the file, and the whole ones that lie beside it.

timm replaces its last checkpoint in two steps, and a process killed between them leaves none; here it is one step.
"""
import functools
import os
import zipfile
from pathlib import Path
from typing import Any, Callable, List, Union

import timm.models._helpers
import timm.task._helpers
from safetensors import SafetensorError, safe_open
from timm.utils import CheckpointSaver

__all__ = ['explain_cut', 'is_cut', 'protect_timm_checkpoints', 'whole_checkpoints']

_START = b'PK\x03\x04'  # of a file of torch.save, which is a zip archive; its end has the list of what is inside


def is_cut(path: Union[str, Path]) -> bool:
    """Whether a checkpoint of torch or safetensors ends too early. (Of torch's format before 1.6 one cannot tell.)"""
    if str(path).endswith('.safetensors'):
        try:
            with safe_open(path, 'pt'):
                return False
        except SafetensorError:
            return True
    with open(path, 'rb') as file:
        return _START.startswith(file.read(len(_START))) and not zipfile.is_zipfile(path)


def whole_checkpoints(folder: Union[str, Path], suffix: str) -> List[Path]:
    """Checkpoints in a folder that are whole, the newest first."""
    found = [path for path in Path(folder).glob(f'*{suffix}') if path.is_file() and not is_cut(path)]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def explain_cut(load: Callable, advice: str = 'Take one of them instead') -> Callable:
    """A function that loads a checkpoint, with an error that helps where the file is cut short.

    Args:
        load: Loads the checkpoint whose path is its first argument.
        advice: What to do with the whole checkpoints beside it.
    """
    @functools.wraps(load)
    def explained(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(path, *args, **kwargs)
        except Exception as error:
            if not os.path.isfile(path) or not is_cut(path):
                raise
            others = [other.name for other in whole_checkpoints(Path(path).parent, Path(path).suffix)[:5]]
            raise RuntimeError(
                f'{path} is cut short: whatever wrote it was killed, or the disk was full. Nothing of it was loaded. '
                + (f'Whole checkpoints beside it, the newest first: {", ".join(others)}. {advice}.' if others else
                   'There is no whole checkpoint beside it: begin anew, or take one from elsewhere.')) from error
    return explained


def _replace(self: CheckpointSaver, src: str, dst: str) -> None:
    os.replace(src, dst)


def protect_timm_checkpoints() -> None:
    """Make timm keep its last checkpoint until the next is there, and explain those that are cut short.

    Importing `timm_gated` does it.
    """
    CheckpointSaver._replace = _replace  # type: ignore[method-assign]
    # --resume, and --initial-checkpoint or --checkpoint; scripts import what calls these, and not these, by name.
    for module, name in (
            (timm.task._helpers, '_load_train_checkpoint'), (timm.models._helpers, 'load_state_dict')):
        setattr(module, name, explain_cut(getattr(module, name)))
