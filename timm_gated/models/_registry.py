"""What this package gives to timm's registry: entry points, and the weights that come with them

Small trained weights lie in `timm_gated/weights`, as `<model>.<tag>.safetensors`, each with its card (`….md`, made by
`tools/hub.py save --tag`: what was measured, and how they were trained). A pretrained config names the file,
and stock timm does the rest, without a network: `timm.create_model('gated_resnet20.bas_c10', pretrained=True)`. To add
weights, put the file there and a line into the `default_cfgs` of the model's family:

    'gated_resnet20.bas_c10': _cfg(file=weights_file('gated_resnet20.bas_c10')),

Of a model's tags with weights the first one is the default.
"""
import difflib
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from timm.models import (
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
    """Path of weights that come with this package, None where they are missing: timm then says that there are none.

    Args:
        name: Of the model, with its tag.
    """
    path = WEIGHTS_DIR / f'{name}.safetensors'
    return str(path) if path.is_file() else None


def entry_points() -> Dict[str, Callable[..., Any]]:
    """The functions of this package that timm makes models with, by name."""
    package = __name__.partition('.')[0]
    registered = ((name, model_entrypoint(name)) for name in list_models())
    return {name: create for name, create in registered if create.__module__.partition('.')[0] == package}


def list_weights() -> List[str]:
    """Names, with their tags, of all weights that models of this package can be made with: the hub's as well."""
    return list_pretrained(list(entry_points()))


def near_models(name: str) -> List[str]:
    """Names of models that are spelt much like this one, or have it in them."""
    name = name.lower()
    return difflib.get_close_matches(name, list_models(), n=5) or list_models(f'*{name}*')[:5]


def check_model_name(name: str) -> None:
    """Refuse a model that does not exist, with near names, a tag that its model does not have, and a missing folder.

    Args:
        name: What `timm.create_model` takes.
    """
    source, place = parse_model_name(name)
    if source == 'local-dir' and not Path(place).is_dir():
        raise ValueError(
            f"there is no folder '{place}': {place}/config.json does not exist. `python tools/hub.py save --output "
            f'{place}` makes it of a checkpoint, timm_gated.save_pretrained of a model.')
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
    """Refuse a model whose tag, the default one if it is not given, has no pretrained weights.

    Args:
        name: What `timm.create_model` takes; a folder or a repository has weights.
        remedy: What to do about it, for the error.
    """
    source, _ = parse_model_name(name)
    if not source and not is_model_pretrained(name):
        others = list_pretrained(split_model_name_tag(name)[0])
        raise ValueError(
            f"there are no pretrained weights for '{name}'. {remedy}" +
            (f' There are weights for {", ".join(others)}.' if others else ''))


def list_gated_models(pattern: str = '') -> List[str]:
    """Names of the timm models that are gated networks, of whatever method: those whose entry point says so.

    Args:
        pattern: Wildcards, as for `timm.list_models`.
    """
    returned = ((name, model_entrypoint(name).__annotations__.get('return')) for name in list_models(pattern))
    return [name for name, cls in returned if isinstance(cls, type) and issubclass(cls, GatedNet)]
