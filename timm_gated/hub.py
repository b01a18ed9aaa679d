"""Models as folders: a config and weights, in the layout of the Hugging Face hub that timm reads"""
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence, Union

from timm.models import save_for_hf

__all__ = ['check_new', 'new_folder', 'save_pretrained']


# The config has the number of classes anyway; the others are of a training or of a machine, not of the model.
_NOT_STORED = ('num_classes', 'device', 'dtype', 'log_interval', 'snapshot_dir', 'snapshot_gates')


def save_pretrained(model: Any, directory: Union[str, Path], label_names: Optional[Sequence[str]] = None) -> Path:
    """Save a model as a folder, from which `timm.create_model('local-dir:…', pretrained=True)` makes it again.

    The folder is written whole or not at all. Options of the model are stored in the config, irregular widths too.

    Args:
        model: A model of this package.
        directory: The folder; it must not exist, or be empty.
        label_names: Names of the outputs, to be stored with them.

    Example:
        >>> save_pretrained(pruned.model, 'pruned')
        >>> timm.create_model('local-dir:pruned', pretrained=True)
    """
    check_new(directory)
    made = hasattr(model, 'model_args') and hasattr(model, 'num_classes')
    if not made or 'architecture' not in getattr(model, 'pretrained_cfg', {}):
        raise ValueError(
            f'this {type(model).__name__} does not know how it was made, so it could not be made again: only models of '
            f'this package that timm.create_model made can be saved.')
    model_args = {k: v for k, v in model.model_args.items() if k not in _NOT_STORED}
    if model.num_classes:
        model_args['global_pool'] = model.global_pool.pool_type  # which may have changed with the head
    config = {} if label_names is None else {'label_names': list(label_names)}
    for name, value in model_args.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f'the option {name}={value!r} cannot be stored in a config: {error}.') from error
    with new_folder(directory) as partial:
        save_for_hf(model, str(partial), model_config=config, model_args=model_args, safe_serialization=True)
    return Path(directory)


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
