"""Files and folders that are written whole or not at all, and errors over those of others that say what is wrong"""
import errno
import os
import shutil
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Optional, Union

import torch
from huggingface_hub.errors import HTTPError

__all__ = ['check_new', 'explained', 'new_file', 'new_folder', 'sync_file']


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
        notes = ''.join(f'\n{note}' for note in getattr(error, '__notes__', ()))
        raise ValueError(f'{problem}: {error} ({type(error).__name__}){notes}') from error


@contextmanager
def new_file(path: Union[str, Path]) -> Iterator[Path]:
    """Temporary file to write to, whose content `path` gets at the end; after an error nothing is left of it.

    The file at `path` is replaced in one step, and keeps its mode and extended attributes; a new one gets the mode that
    the umask leaves. Links are followed. What cannot be replaced without a difference is written in place, once the
    content is complete: a device, a pipe, an open file without a name, a file with other hard links, of another owner
    or in a folder that is closed to writing, a mount point. A file that is closed to writing is an error, as it is for
    `open`. Any number of processes may write to one path: each replacement is whole, and the last one stays. A killed
    process leaves a hidden folder, `.….partial`.
    """
    path = Path(path)
    is_special = _stat(path) is not None and not _is_open_file(path.resolve())
    if not is_special:
        path = path.resolve()
    with tempfile.TemporaryDirectory('.partial', '.', dir=None if is_special else path.parent) as folder:
        partial = Path(folder) / path.name
        partial.touch()
        created = partial.stat()
        yield partial
        current = _stat(path)
        if is_special or (current is not None and not _is_replaceable(current, created)):
            _write_in_place(partial, path)
            return
        sync_file(partial)
        if current is None:
            partial.chmod(stat.S_IMODE(created.st_mode))
        else:
            shutil.copystat(path, partial)
            os.utime(partial)  # (it is written now)
        try:
            os.replace(partial, path)
        except OSError as error:
            if error.errno != errno.EBUSY:  # a mount point
                raise
            _write_in_place(partial, path)


def _stat(path: Path) -> Optional[os.stat_result]:
    """None if there is nothing."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_open_file(path: Path) -> bool:
    """Whether this is a regular file that may be written, in a folder that may be."""
    return path.is_file() and os.access(path, os.W_OK) and os.access(path.parent, os.W_OK | os.X_OK)


def _is_replaceable(current: os.stat_result, created: os.stat_result) -> bool:
    owners = (current.st_uid, current.st_gid), (created.st_uid, created.st_gid)
    return current.st_nlink <= 1 and owners[0] == owners[1]


def _write_in_place(source: Path, path: Path) -> None:
    with open(source, 'rb') as content, open(path, 'wb') as target:
        shutil.copyfileobj(content, target)


def sync_file(path: Union[str, Path]) -> None:
    """Wait until a file is on the disk."""
    with open(path, 'rb') as file:
        os.fsync(file.fileno())


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
