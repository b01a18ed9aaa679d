"""What the config of a model from elsewhere may say

timm merges the `model_args` of a `config.json`, from the hub or from a folder, into the arguments of the entry point,
where they cannot be told from the user's own. So a model of this package reads that config again, and refuses options
that are not the model's: where files are written or read, which weights are fetched, how the model is made. Whoever
wants one of these gives it to `timm.create_model` himself. Nor may such a model be of any size.
"""
import inspect
import json
import re
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Collection, Dict, Iterator, Mapping, Optional, Tuple, Type, Union

import timm
import torch.nn as nn
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models import build_model_with_cfg
from torch.nn.modules.module import register_module_parameter_registration_hook

from .files import explained

__all__ = ['MAKING', 'NOT_STORED', 'check_model_args', 'checked_origin', 'options_of_class', 'read_config', 'storable']

# Of a config and of the model that it makes: far more than the largest of this package, far less than a machine has.
MOST_BYTES, MOST_LEVELS = 10**7, 50
MOST_PARAMETERS, MOST_TENSORS = 10**9, 5_000

# The config has the number of classes anyway; the others are of a training or of a machine, not of the model.
NOT_STORED = ('num_classes', 'device', 'dtype', 'log_interval', 'snapshot_dir', 'snapshot_gates')

# What belongs to an entry point, or to the way in which a model is made: files and weights to start from, and more.
MAKING = frozenset({
    *inspect.signature(timm.create_model).parameters,
    *inspect.signature(build_model_with_cfg).parameters,
    'block', 'features_only', 'out_indices', 'feature_cls', 'pruned',  # which timm's builder takes besides
    'dense_variant', 'depth', 'gate_layer', 'more_options', 'objective', 'recipe',  # of our own
} - {'kwargs'})

# A model's name that says where it is, as timm reads it.
_ELSEWHERE = re.compile(r'\s*(hf[-_]hub|local-dir):', re.IGNORECASE)


def read_config(path: Path, where: str) -> Dict[str, Any]:
    """Read a `config.json` as far as all of them are alike; otherwise raise a ValueError.

    Args:
        path: Of the file.
        where: The config, for the message.
    """
    if not path.is_file():
        raise ValueError(f'{where} is not there; a model is a folder with its {path.name} and its weights.')
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f'{where} is too large for a config: {path.stat().st_size:,} bytes; at most {MOST_BYTES:,}.')
    try:
        config = json.loads(path.read_text(encoding='utf-8'))
        levels = _levels(config)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where} is not JSON: {error}.') from error
    if levels > MOST_LEVELS:
        raise ValueError(f'{where} is nested too deeply for a config: {levels} levels; at most {MOST_LEVELS}.')
    if not isinstance(config, dict):
        raise ValueError(f'{where} must hold an object with the model and its options, got a {type(config).__name__}.')
    for key, kind, what in (
            ('architecture', str, 'the name of a timm model'), ('pretrained_cfg', dict, 'an object'),
            ('model_args', dict, 'an object of options')):
        if key in config and not isinstance(config[key], kind):
            raise ValueError(f"'{key}' of {where} must be {what}, got {_short(config.get(key))}.")
    return config


def check_model_args(model_args: Mapping[str, Any], where: str, known: Optional[Collection[str]] = None) -> None:
    """Refuse options that are not for a config to set, at any depth, and if `known` is given, all others than these.

    Args:
        model_args: The options.
        where: The config, for the message.
        known: Options that the model has.
    """
    for name, key, value in _walk(model_args):
        if key in MAKING or key in NOT_STORED:
            raise ValueError(
                f"{where} sets '{name}' to {_short(value)}, which is not an option of the model. Take it out of "
                f'model_args there; if you want it, give it to timm.create_model yourself.')
        if isinstance(value, str) and _ELSEWHERE.match(value):
            raise ValueError(
                f"{where} sets '{name}' to {_short(value)}: a config may name timm's models, but not fetch others. Put "
                f'the plain name of a model there.')
    unknown = [] if known is None else [_short(key).strip("'") for key in model_args if key not in known]
    if unknown:
        raise ValueError(
            f"{where} has unknown options in model_args: {', '.join(unknown)}. Was it saved for another "
            f'model, or by another version of this package?')


@contextmanager
def checked_origin(
        variant: str,
        pretrained_cfg: Any,
        known: Optional[Collection[str]] = None,
        cache_dir: Union[str, Path, None] = None,
) -> Iterator[None]:
    """Where a model is made. If its config came from the hub or from a folder, that is checked first, the model must
    not grow beyond all bounds, and what goes wrong is a ValueError that names it.

    Args:
        variant: Name of the entry point.
        pretrained_cfg: What timm made of the config.
        known: Options that the model has.
        cache_dir: Cache of the hub.
    """
    origin = _origin(pretrained_cfg)
    if not origin:
        yield
        return
    path = _config_file(pretrained_cfg, cache_dir)
    if path is not None and path.is_file():  # (whoever gives a pretrained_cfg by himself may have none)
        where = f'the config of {origin}'
        config = read_config(path, where)
        # (An entry point that makes a model by way of another one has options of its own.)
        check_model_args(
            config.get('model_args', {}), where, known if config.get('architecture') == variant else None)
    with explained(f'{origin} does not make a model'), _bounded(origin):
        yield


def _origin(pretrained_cfg: Any) -> str:
    """Where a model comes from if that is elsewhere, as timm names it."""
    source = pretrained_cfg.get('source') if isinstance(pretrained_cfg, Mapping) else None
    place = {'local-dir': 'file', 'hf-hub': 'hf_hub_id'}.get(source or '')
    return f'{source}:{pretrained_cfg[place]}' if place else ''


def _config_file(pretrained_cfg: Mapping[str, Any], cache_dir: Union[str, Path, None]) -> Optional[Path]:
    """The very file that timm has just read."""
    if pretrained_cfg['source'] == 'local-dir':
        return Path(pretrained_cfg['file']) / 'config.json'
    repo_id, _, revision = pretrained_cfg['hf_hub_id'].partition('@')
    try:
        return Path(hf_hub_download(
            repo_id, 'config.json', revision=revision or None, cache_dir=cache_dir, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


@contextmanager
def _bounded(origin: str) -> Iterator[None]:
    """Where a model is made that must not grow beyond all bounds. Memory that was asked for is not used before that."""
    thread, parameters, tensors = threading.get_ident(), 0, 0

    def count(module: nn.Module, name: str, parameter: Optional[nn.Parameter]) -> None:
        nonlocal parameters, tensors
        if parameter is None or threading.get_ident() != thread:
            return
        parameters, tensors = parameters + parameter.numel(), tensors + 1
        if parameters > MOST_PARAMETERS or tensors > MOST_TENSORS:
            raise ValueError(
                f'{origin} asks for a network of more than {MOST_PARAMETERS:,} parameters or {MOST_TENSORS:,} tensors. '
                f'If it is to be so large, make it by its name, and load the weights into it.')

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def options_of_class(model_cls: Type[nn.Module]) -> Tuple[str, ...]:
    """Options that a class takes, as far up as its keyword arguments are handed on."""
    names: Dict[str, None] = {}
    for cls in model_cls.__mro__:
        if '__init__' not in vars(cls):
            continue
        parameters = list(inspect.signature(vars(cls)['__init__']).parameters.values())[1:]
        names.update({p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)})
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            break
    return tuple(name for name in names if name not in MAKING and name not in NOT_STORED)


def storable(model_args: Mapping[str, Any]) -> Dict[str, Any]:
    """Options as a config holds them: without those that it may not set, at any depth.

    An option that a config cannot hold, or that names a model elsewhere, is a ValueError.
    """
    kept = _without(model_args)
    for name, value in kept.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f'the option {name}={value!r} cannot be stored in a config: {error}.') from error
    check_model_args(kept, 'this model')
    return kept


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without(v) for k, v in value.items() if k not in MAKING and k not in NOT_STORED}
    return value


def _walk(value: Any, name: str = '') -> Iterator[Tuple[str, Any, Any]]:
    """Everything in a value out of JSON: its name from the root, the last part of that, and what is there."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        inner = f'{name}.{key}' if name else str(key)
        yield inner, key, item
        yield from _walk(item, inner)


def _levels(value: Any) -> int:
    """How deep a value out of JSON is nested."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_levels, inner), default=0)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f'{text[:80]} …'
