"""What this package gives to timm's registry: entry points, and the weights that come with them

Small trained weights lie in `timm_gated/weights`, as `<model>.<tag>.safetensors`, each with its card (`….md`, made by
`tools/hub.py save --tag`: what was measured, and how they were trained). A pretrained config names the file,
and stock timm does the rest, without a network: `timm.create_model('gated_resnet20.bas_c10', pretrained=True)`. To add
weights, put the file there and a line into the `default_cfgs` of the model's family:

    'gated_resnet20.bas_c10': _cfg(file=weights_file('gated_resnet20.bas_c10')),

Of a model's tags with weights the first one is the default.
"""
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from timm.models import list_models, list_pretrained, model_entrypoint

__all__ = ['WEIGHTS', 'entry_points', 'list_weights', 'weights_file']

WEIGHTS = Path(__file__).resolve().parent / 'weights'


def weights_file(name: str) -> Optional[str]:
    """Path of weights that come with this package, None where they are missing: timm then says that there are none.

    Args:
        name: Of the model, with its tag.
    """
    path = WEIGHTS / f'{name}.safetensors'
    return str(path) if path.is_file() else None


def entry_points() -> Dict[str, Callable[..., Any]]:
    """The functions of this package that timm makes models with, by name."""
    package = __name__.partition('.')[0]
    registered = ((name, model_entrypoint(name)) for name in list_models())
    return {name: create for name, create in registered if create.__module__.partition('.')[0] == package}


def list_weights() -> List[str]:
    """Names, with their tags, of all weights that models of this package can be made with: the hub's as well."""
    return list_pretrained(list(entry_points()))
