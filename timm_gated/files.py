"""Files and folders that are written whole or not at all"""
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Union

__all__ = ['check_new', 'new_file', 'new_folder']


@contextmanager
def new_file(path: Union[str, Path]) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end; after an error nothing is left of it."""
    path = Path(path)
    partial = path.with_name(f'.{path.stem}.partial{path.suffix}')
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
