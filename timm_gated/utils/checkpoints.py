"""Checkpoints that a killed training leaves

A process that is killed, or runs out of disk, while it writes leaves a part of a file. torch and safetensors never take
a part for the whole, but what they say of it ('Invalid argument', 'retry with weights_only=False') neither names the
file nor helps. `cut_explained` adds a note that does.
"""
import os
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, List, Union

from safetensors import SafetensorError, safe_open

__all__ = ['cut_explained', 'is_cut', 'others_beside', 'whole_checkpoints']

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


@contextmanager
def cut_explained(path: Any, advice: str = 'Take one of them instead') -> Iterator[None]:
    """Add a note to errors over a checkpoint that is cut short. All other errors pass as they are.

    Args:
        path: Path of the checkpoint that is loaded; anything else is not looked at.
        advice: What to do with the whole checkpoints beside it.
    """
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # whatever keeps us from looking, it is not the error
            if isinstance(path, (str, Path)) and os.path.isfile(path) and is_cut(path):
                error.add_note(
                    f'{path} is cut short: whatever wrote it was killed, or the disk was full. Nothing of it was '
                    f'loaded. {others_beside(path, advice)}')
        raise


