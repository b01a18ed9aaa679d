"""Weights of timm models, and safetensors files, wherever mmengine takes a checkpoint

    init_cfg=dict(type='Pretrained', checkpoint='timm-gated://gated_resnet20.bas_c10')

After the prefix comes what `timm.create_model` takes for a name: weights of this package by their tag (those inside the
package need no network), `local-dir:FOLDER` or `hf-hub:OWNER/NAME`. They get the names of mmseg's backbones and lose
their classifier. Files that end in `.safetensors` are taken as they are, like a `.pth`. Nothing but tensors is read.
"""
import os
from pathlib import Path
from typing import Any, Dict

import safetensors.torch
import torch
from mmengine.runner.checkpoint import CheckpointLoader
from timm.models import (
    get_pretrained_cfg,
    is_model_pretrained,
    load_state_dict,
    load_state_dict_from_hf,
    parse_model_name,
)
from timm.models._hub import load_state_dict_from_path

from timm_gated.files import explained
from timm_gated.gated_net import rename_linear_head
from timm_gated.zoo import entry_points, list_weights

from .convert import timm_to_mmseg

__all__ = ['load_from_safetensors', 'load_from_timm_gated']

PREFIX = 'timm-gated://'


@CheckpointLoader.register_scheme(prefixes=PREFIX)
def load_from_timm_gated(filename: str, map_location: Any = None) -> Dict[str, torch.Tensor]:
    """State dict of a backbone from the weights of a timm model.

    Args:
        filename: 'timm-gated://' and a name.
        map_location: Device of the tensors.
    """
    name = filename.removeprefix(PREFIX)
    with explained(f"the weights '{name}' are not whole, or none"):
        state_dict = _read(name)
        rename_linear_head(state_dict)
        if not any(key.startswith('layer1.0.conv1.') for key in state_dict):
            raise ValueError(f"the weights '{name}' are not those of a ResNet: they have no layer1.0.conv1.")
        return _moved(timm_to_mmseg(state_dict), map_location)


# (mmengine matches prefixes as regular expressions; other places than this machine's have schemes of their own.)
@CheckpointLoader.register_scheme(prefixes=r'(?!\S+://).+\.safetensors$')
def load_from_safetensors(filename: str, map_location: Any = None) -> Dict[str, torch.Tensor]:
    """State dict from a local safetensors file, as it is.

    Args:
        filename: Its path.
        map_location: Device of the tensors.
    """
    path = os.path.expanduser(filename)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'{path} can not be found.')
    return _moved(safetensors.torch.load_file(path), map_location)


def _read(name: str) -> Dict[str, torch.Tensor]:
    source, place = parse_model_name(name)
    if source == 'local-dir':
        if not Path(place).is_dir():
            raise ValueError(f"there is no folder '{place}' to take weights from.")
        return load_state_dict_from_path(place)
    if source == 'hf-hub':
        return load_state_dict_from_hf(place)
    if name.partition('.')[0] not in entry_points() or not is_model_pretrained(name):
        raise ValueError(f"this package has no weights '{name}'; it has: {', '.join(list_weights())}.")
    cfg: Any = get_pretrained_cfg(name)
    return load_state_dict(cfg.file) if cfg.file else load_state_dict_from_hf(cfg.hf_hub_id)


def _moved(state_dict: Dict[str, torch.Tensor], device: Any) -> Dict[str, torch.Tensor]:
    return state_dict if device is None else {key: tensor.to(device) for key, tensor in state_dict.items()}
