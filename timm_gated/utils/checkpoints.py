"""Truncated checkpoints

A process that is killed or runs out of disk space while writing leaves a truncated file. torch and safetensors refuse
to load it, but their errors ('Invalid argument', 'retry with weights_only=False') name neither the file nor the cause.
`cut_explained` adds a note that does.
"""
import os
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, List, Union

from safetensors import SafetensorError, safe_open

__all__ = ['complete_checkpoints', 'cut_explained', 'is_truncated', 'others_beside']

_START = b'PK\x03\x04'  # torch.save writes zip archives, with the list of their contents at the end


def is_truncated(path: Union[str, Path]) -> bool:
    """Whether a checkpoint of torch or safetensors is truncated. Not detected in torch's format before 1.6."""
    if _is_complete(path):
        return False
    with open(path, 'rb') as file:
        return str(path).endswith('.safetensors') or _START.startswith(file.read(len(_START)))


def _is_complete(path: Union[str, Path]) -> bool:
    if not str(path).endswith('.safetensors'):
        return zipfile.is_zipfile(path)
    try:
        with safe_open(path, 'pt'):
            return True
    except SafetensorError:
        return False


def complete_checkpoints(folder: Union[str, Path], suffix: str) -> List[Path]:
    """Complete checkpoints in a folder, newest first."""
    found = []
    for path in Path(folder).glob(f'[!.]*{suffix}'):  # hidden files are still being written
        with suppress(OSError):  # deleted meanwhile, or not readable
            if path.is_file() and _is_complete(path):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def others_beside(path: Union[str, Path], advice: str) -> str:
    """Note for an error about an unusable checkpoint: the complete ones in its folder, and advice on using them."""
    others = [other.name for other in complete_checkpoints(Path(path).parent, Path(path).suffix)[:5]]
    if others:
        return f'Complete checkpoints in its folder, newest first: {", ".join(others)}. {advice}.'
    return 'Its folder has no complete checkpoint: download it again, or restart the training.'


@contextmanager
def cut_explained(path: Any, advice: str = 'Use one of them instead') -> Iterator[None]:
    """Add a note to errors about a truncated checkpoint. Other errors are unchanged.

    Args:
        path: Path of the loaded checkpoint; other types are ignored.
        advice: Advice on using the complete checkpoints in its folder.
    """
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # the original error matters more
            if isinstance(path, (str, Path)) and os.path.isfile(path) and is_truncated(path):
                error.add_note(
                    f'{path} is truncated: the process that wrote it was killed, or the disk was full. Nothing was '
                    f'loaded. {others_beside(path, advice)}')
        raise
