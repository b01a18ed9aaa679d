"""Checks of untrusted model configs

A `config.json` from the hub or from a folder must not write files, download other weights or run code. The options
that could are refused by name. timm and the model validate all others.

timm merges the `model_args` of a config with the user's arguments, and also passes them to the entry point separately,
as `pretrained_model_args`. Only the latter are checked: users may set every option.
"""
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Tuple

__all__ = ['check_entry_args', 'check_model_args', 'read_config', 'storable']

# Options that write files or load weights, in the model or in a network inside it.
_REFUSED = frozenset({
    'snapshot_dir', 'cache_dir', 'checkpoint_path', 'pretrained', 'pretrained_cfg', 'pretrained_cfg_overlay'})

# Options that name a timm model. A source before the name, such as 'hf-hub:', would download it.
_MODEL_NAMES = frozenset({'network', 'gater'})
_PLAIN_NAME = re.compile(r'[\w.-]+')


def read_config(path: Path, where: str) -> Dict[str, Any]:
    """Read a `config.json` and check its structure. Raises a ValueError if the file is missing or malformed.

    Args:
        path: Path of the file.
        where: Name of the config, used in error messages.
    """
    if not path.is_file():
        raise ValueError(f'{where} does not exist; a model is a folder with {path.name} and weights.')
    try:
        config = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where} is not JSON: {error}.') from error
    if not isinstance(config, dict):
        raise ValueError(f'{where} must hold an object with the model and its options, got a {type(config).__name__}.')
    for key, kind, what in (
            ('architecture', str, 'the name of a timm model'), ('pretrained_cfg', dict, 'an object'),
            ('model_args', dict, 'an object of options')):
        if key in config and not isinstance(config[key], kind):
            raise ValueError(f"'{key}' of {where} must be {what}, got {_short(config[key])}.")
    return config


def check_model_args(model_args: Mapping[str, Any], where: str) -> None:
    """Refuse options that would write files or download weights, at any depth.

    Args:
        model_args: Options in a config.
        where: Name of the config, used in error messages.
    """
    for path, key, value in _walk(model_args):
        if key in _REFUSED:
            raise ValueError(
                f"{where} sets '{path}' to {_short(value)}, which a config must not set. Remove it from the "
                f'model_args, or pass it to timm.create_model yourself.')
        if key in _MODEL_NAMES and not (isinstance(value, str) and _PLAIN_NAME.fullmatch(value)):
            raise ValueError(
                f"{where} sets '{path}' to {_short(value)}. A config may only name a timm model there, not a source "
                f'to download it from.')


def check_entry_args(kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of an entry point that come from a config.

    Args:
        kwargs: Keyword arguments of the entry point.
    """
    cfg = kwargs.get('pretrained_cfg') or {}
    place = (cfg.get('hf_hub_id') or cfg.get('file')) if isinstance(cfg, Mapping) else None
    check_model_args(kwargs.get('pretrained_model_args') or {}, f'the config of {place}')


def storable(model_args: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the options without those that a config must not set, at any depth.

    Args:
        model_args: Options of a model.
    """
    kept = _without_refused(model_args)
    check_model_args(kept, 'this model')
    return kept


def _without_refused(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_refused(v) for k, v in value.items() if k not in _REFUSED}
    return value


def _walk(value: Any, path: str = '') -> Iterator[Tuple[str, Any, Any]]:
    """Yield every item of a JSON value with its path from the root and the last part of that path."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        inner = f'{path}.{key}' if path else str(key)
        yield inner, key, item
        yield from _walk(item, inner)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:80]} …'
