"""timm's ResNet family, from timm's registry

`RESNETS` names its entry points. Each can be built with other blocks or widths: `register_variants` derives an entry
point from each of them, and `pretrained_cfgs` the configs of its weights. New ResNets of timm join without a change
here. Importing this module builds no network.

Left out is `resnet50_gn`: a group norm computes statistics over several filters, so no filter can be skipped alone.
"""
import sys
from dataclasses import replace
from typing import Any, Callable, Dict

from timm.models import (
    PretrainedCfg,
    get_arch_pretrained_cfgs,
    get_pretrained_cfg_value,
    list_models,
    model_entrypoint,
    register_model,
    split_model_name_tag,
)
from timm.models.resnet import ResNet

__all__ = ['RESNETS', 'first_conv', 'pretrained_cfgs', 'register_variants']

RESNETS = [
    name for name in list_models(module='resnet')
    if model_entrypoint(name).__module__ == ResNet.__module__ and not name.endswith('_gn')]


def pretrained_cfgs(name: str) -> Dict[str, PretrainedCfg]:
    """Configs of timm's weights of a ResNet, by tag.

    Args:
        name: Entry point of timm.
    """
    tagged = {split_model_name_tag(full)[1]: cfg for full, cfg in get_arch_pretrained_cfgs(name).items()}
    return {tag: replace(cfg, architecture=None, tag=None) for tag, cfg in tagged.items() if cfg.has_weights}


def first_conv(name: str) -> str:
    """Name of the first convolution of a ResNet.

    Args:
        name: Entry point of timm.
    """
    return get_pretrained_cfg_value(name, 'first_conv') or 'conv1'


def register_variants(module: str, prefix: str, create: Callable[..., Any], summary: str) -> None:
    """Register an entry point for each ResNet of timm, called `<prefix>_<name in timm>`.

    Args:
        module: Module of the entry points; it holds their `default_cfgs`.
        prefix: First part of the names.
        create: Function that is called with the name in timm, `pretrained` and the options.
        summary: Docstring of the entry points, with a placeholder for the name in timm.
    """
    for name in RESNETS:
        entry_point = _entry_point(name, create)
        entry_point.__module__, entry_point.__doc__ = module, summary.format(name)
        entry_point.__name__ = entry_point.__qualname__ = f'{prefix}_{name}'
        entry_point.__annotations__['return'] = create.__annotations__['return']
        setattr(sys.modules[module], entry_point.__name__, register_model(entry_point))


def _entry_point(name: str, create: Callable[..., Any]) -> Callable[..., Any]:
    def entry_point(pretrained: bool = False, **kwargs) -> Any:
        return create(name, pretrained, **kwargs)

    return entry_point
