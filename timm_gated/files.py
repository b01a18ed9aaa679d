"""Files and folders that are written whole or not at all, and errors over those of others that say what is wrong"""
import errno
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Union

import torch
from huggingface_hub.errors import HTTPError

__all__ = ['check_new', 'explained', 'new_file', 'new_folder', 'replace_file']


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Where a file of unknown origin is read: an error in here becomes a ValueError that begins with the problem.

    What a file may hold, and how that then fails, has no end. Errors of the system and of the network stay as they are.

    Args:
        problem: What went wrong then, with the name of the file.
    """
    try:
        yield
    except (HTTPError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
        elsewhere = isinstance(error, OSError) and error.errno != errno.EINVAL  # (torch's, over a file cut short)
        if said or elsewhere:
            raise
        raise ValueError(f'{problem}: {error} ({type(error).__name__})') from error


@contextmanager
def new_file(path: Union[str, Path]) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end; after an error nothing is left of it.

    What a killed process leaves is written over by the next that writes to the path; there may be one at a time.
    """
    path = Path(path).resolve()  # (a link stays one)
    partial = path.with_name(f'.{path.stem}.partial{path.suffix}')
    try:
        yield partial
        replace_file(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def replace_file(source: Union[str, Path], target: Union[str, Path]) -> None:
    """Put a file in the place of another, in one step, once it is on the disk."""
    with open(source, 'rb') as file:
        os.fsync(file.fileno())
    os.replace(source, target)


def check_new(directory: Union[str, Path]) -> None:
    """Refuse a folder that has something in it."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f'{directory} exists already; choose a folder that does not.')


@contextmanager
def new_folder(directory: Union[str, Path]) -> Iterator[Path]:
    """A folder to write to, which becomes `directory` at the end; after an error nothing is left of it."""
    directory = Path(directory).resolve()
    check_new(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # (A folder within a temporary one, because temporary ones are closed to others.)
    with tempfile.TemporaryDirectory(prefix=f'.{directory.name}.', dir=directory.parent) as temporary:
        partial = Path(temporary) / directory.name
        partial.mkdir()
        yield partial
        os.replace(partial, directory)
