"""Entry points of this package in timm's registry, and their packaged weights

Small trained weights are part of the package: `timm_gated/weights/<model>.<tag>.safetensors`, each with a model card
`<model>.<tag>.md` and its pictures (written by `timm-gated hub save --tag`). The pretrained config names the file, so
that timm loads it without a network connection: `timm.create_model('gated_resnet20.bas_c10', pretrained=True)`. To add
weights, add the files and an entry in the `default_cfgs` of the model's module:

    'gated_resnet20.bas_c10': _cfg(file=weights_file('gated_resnet20.bas_c10')),

The first tag with weights is the default tag of a model.
"""
import difflib
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from timm.models import (
    get_arch_name,
    is_model,
    is_model_pretrained,
    list_models,
    list_pretrained,
    model_entrypoint,
    parse_model_name,
    split_model_name_tag,
)

from ._gated_net import GatedNet

__all__ = [
    'WEIGHTS_DIR', 'check_model_name', 'check_weights', 'entry_points', 'list_gated_models', 'list_weights',
    'near_models', 'weights_file',
]

WEIGHTS_DIR = Path(__file__).resolve().parents[1] / 'weights'


def weights_file(name: str) -> Optional[str]:
    """Path of packaged weights, None if the file is missing.

    Args:
        name: Name of the model with its tag.
    """
    path = WEIGHTS_DIR / f'{name}.safetensors'
    return str(path) if path.is_file() else None


def entry_points() -> Dict[str, Callable[..., Any]]:
    """Registered entry points of this package, by name."""
    package = __name__.partition('.')[0]
    registered = ((name, model_entrypoint(name)) for name in list_models())
    return {name: create for name, create in registered if create.__module__.partition('.')[0] == package}


def list_weights() -> List[str]:
    """Names with tags of all pretrained weights of this package's models, packaged or on the hub."""
    own = entry_points()
    return [name for name in list_pretrained() if get_arch_name(name) in own]


def near_models(name: str) -> List[str]:
    """Names of models that are similar to this one or contain it."""
    name = name.lower()
    return difflib.get_close_matches(name, list_models(), n=5) or list_models(f'*{name}*')[:5]


def check_model_name(name: str) -> None:
    """Raise a ValueError if a model, its tag or its folder does not exist.

    Args:
        name: Model name, as for `timm.create_model`.
    """
    source, place = parse_model_name(name)
    if source == 'local-dir' and not Path(place).is_dir():
        raise ValueError(
            f"there is no folder '{place}': {place}/config.json does not exist. `timm-gated hub save --output "
            f'{place}` creates it from a checkpoint, timm_gated.save_pretrained from a model.')
    if source:
        return
    model, tag = split_model_name_tag(place)
    if not is_model(model):
        near = near_models(model)
        raise ValueError(
            f"timm has no model '{model}'" + (f'; near: {", ".join(near)}' if near else '') +
            '. timm.list_models() lists all.')
    tags = [split_model_name_tag(tagged)[1] for tagged in list_models(model, include_tags=True)]
    if tag and tag not in tags:
        raise ValueError(f"'{model}' has no tag '{tag}'; its tags: {', '.join(filter(None, tags)) or 'none'}.")


def check_weights(name: str, remedy: str) -> None:
    """Raise a ValueError if a model has no pretrained weights.

    Args:
        name: Model name, as for `timm.create_model`. Folders and hub repositories are not checked.
        remedy: Advice for the error message.
    """
    source, _ = parse_model_name(name)
    if not source and not is_model_pretrained(name):
        others = list_pretrained(split_model_name_tag(name)[0])
        raise ValueError(
            f"there are no pretrained weights for '{name}'. {remedy}" +
            (f' There are weights for {", ".join(others)}.' if others else ''))


def list_gated_models(pattern: str = '') -> List[str]:
    """Names of all registered gated models, identified by the return annotation of their entry point.

    Args:
        pattern: Wildcard filter, as for `timm.list_models`.
    """
    returned = ((name, model_entrypoint(name).__annotations__.get('return')) for name in list_models(pattern))
    return [name for name, cls in returned if isinstance(cls, type) and issubclass(cls, GatedNet)]
