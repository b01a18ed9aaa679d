"""Atomic writing of files and folders, and clear errors about unreadable files"""
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
    """Turn any error about the content of a file into a ValueError that begins with `problem`.

    Errors of the operating system and of the network are unchanged.

    Args:
        problem: Description of the problem, with the name of the file.
    """
    try:
        yield
    except (HTTPError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        is_clear = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
        is_system = isinstance(error, OSError) and error.errno != errno.EINVAL  # torch raises EINVAL if truncated
        if is_clear or is_system:
            raise
        notes = ''.join(f'\n{note}' for note in getattr(error, '__notes__', ()))
        raise ValueError(f'{problem}: {error} ({type(error).__name__}){notes}') from error


@contextmanager
def new_file(path: Union[str, Path]) -> Iterator[Path]:
    """Temporary file that replaces `path` when the context ends. After an error it is deleted.

    The file at `path` is replaced atomically and keeps its mode and extended attributes; a new file gets the mode that
    the umask allows. Links are followed. Devices, pipes, unnamed open files, mount points, and files with other hard
    links, of another owner or in a read-only folder cannot be replaced: they are overwritten once the content is
    complete. A read-only file raises an error, as with `open`. Several processes may write to one path; the last one
    wins. A killed process leaves a hidden folder, `.….partial`.
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
            os.utime(partial)  # the time of writing
        try:
            os.replace(partial, path)
        except OSError as error:
            if error.errno != errno.EBUSY:  # a mount point
                raise
            _write_in_place(partial, path)


def _stat(path: Path) -> Optional[os.stat_result]:
    """Status of a path; None if it does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_open_file(path: Path) -> bool:
    """Whether a path is a writable regular file in a writable folder."""
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
    """Raise a ValueError if the folder exists and is not empty."""
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f'{directory} exists already; choose a folder that does not.')


@contextmanager
def new_folder(directory: Union[str, Path]) -> Iterator[Path]:
    """Temporary folder that becomes `directory` when the context ends. After an error it is deleted."""
    directory = Path(directory).resolve()
    check_new(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # A folder inside the temporary one, whose mode forbids access by others.
    with tempfile.TemporaryDirectory(prefix=f'.{directory.name}.', dir=directory.parent) as temporary:
        partial = Path(temporary) / directory.name
        partial.mkdir()
        yield partial
        os.replace(partial, directory)
