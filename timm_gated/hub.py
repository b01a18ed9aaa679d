"""Models as folders: a config and weights, in the layout of the Hugging Face hub that timm reads"""
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Union

from timm.models import save_for_hf

__all__ = ['save_pretrained']


def save_pretrained(model: Any, directory: Union[str, Path]) -> Path:
    """Save a model as a folder, from which `timm.create_model('local-dir:…', pretrained=True)` makes it again.

    The folder is written whole or not at all. Options of the model are stored in the config, irregular widths too.

    Args:
        model: A model of this package.
        directory: The folder; it must not exist, or be empty.

    Example:
        >>> save_pretrained(pruned.model, 'pruned')
        >>> timm.create_model('local-dir:pruned', pretrained=True)
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f'{directory} exists already; choose a folder that does not.')
    if not hasattr(model, 'model_args') or 'architecture' not in getattr(model, 'pretrained_cfg', {}):
        raise ValueError(
            f'this {type(model).__name__} does not know how it was made, so it could not be made again: only models of '
            f'this package that timm.create_model made can be saved.')
    model_args = {k: v for k, v in model.model_args.items() if k != 'num_classes'}  # the config has it anyway
    for name, value in model_args.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f'the option {name}={value!r} cannot be stored in a config: {error}.') from error
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f'.{directory.name}.', dir=directory.parent))
    try:
        save_for_hf(model, str(partial), model_args=model_args, safe_serialization=True)
        partial.chmod(0o777 & ~_umask())
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
