"""Weights of timm models, and safetensors files, wherever mmengine takes a checkpoint

    init_cfg=dict(type='Pretrained', checkpoint='timm-gated://gated_resnet20.bas_c10')

After the prefix comes what `timm.create_model` takes for a name: weights of this package by their tag (those inside the
package need no network), `local-dir:FOLDER` or `hf-hub:OWNER/NAME`. They get the names of mmseg's backbones and lose
their classifier. Files that end in `.safetensors` are taken as they are, like a `.pth`. Nothing but tensors is read.

mmengine writes a checkpoint in place, and writes the last one again once it is known to be the best; killed then, a
training could not be resumed. Here files are written whole or not at all. A checkpoint that is cut short all the same
is refused with an error that names it and those to go on from.
"""
import os
from pathlib import Path
from typing import Any, Dict, Union

import safetensors.torch
import torch
from mmengine.fileio import LocalBackend, register_backend
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.runner.checkpoint import load_from_local as _load_from_local
from timm.models import (
    get_pretrained_cfg,
    is_model_pretrained,
    load_state_dict,
    load_state_dict_from_hf,
    parse_model_name,
)
from timm.models._hub import load_state_dict_from_path

from timm_gated.cut_checkpoints import explain_load, others_beside
from timm_gated.files import explained, new_file
from timm_gated.gated_net import rename_linear_head
from timm_gated.zoo import check_model_name, entry_points, list_weights

from .convert import timm_to_mmseg

__all__ = ['WholeFileBackend', 'load_from_local', 'load_from_safetensors', 'load_from_timm_gated']

PREFIX = 'timm-gated://'

_ADVICE = 'A training that was killed goes on from the newest of its own by --resume --cfg-options load_from=PATH'
_load_file = explain_load(safetensors.torch.load_file, _ADVICE)
_load_local = explain_load(_load_from_local, _ADVICE)


@register_backend('local', force=True, prefixes='')
class WholeFileBackend(LocalBackend):
    """mmengine's files on this machine, each written whole or not at all: what was there stays until then."""

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        with new_file(filepath) as partial:
            super().put(obj, partial)

    def put_text(self, obj: str, filepath: Union[str, Path], encoding: str = 'utf-8') -> None:
        self.put(obj.encode(encoding), filepath)


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
    _check_there(path)
    return _moved(_load_file(path), map_location)


@CheckpointLoader.register_scheme(prefixes='', force=True)
def load_from_local(filename: str, map_location: Any = None) -> Any:
    """A checkpoint from a local file, as mmengine's own loader takes it, with errors that help after a kill.

    Args:
        filename: Its path.
        map_location: Device of the tensors.
    """
    if not filename:  # what mmengine reads from a last_checkpoint that it was about to write
        raise FileNotFoundError(
            f'there is no checkpoint to load: the name is empty. If this is --resume, the training was killed while it '
            f'wrote the file last_checkpoint in its work_dir, where the checkpoints are. {_ADVICE}.')
    _check_there(os.path.expanduser(filename))
    return _load_local(filename, map_location)


def _check_there(path: str) -> None:
    # mmengine removes a checkpoint before it writes the next: killed between, last_checkpoint names none.
    if not os.path.isfile(path):
        raise FileNotFoundError(f'{path} can not be found. {others_beside(path, _ADVICE)}')


def _read(name: str) -> Dict[str, torch.Tensor]:
    source, place = parse_model_name(name)
    if source == 'local-dir':
        check_model_name(name)
        return load_state_dict_from_path(place)
    if source == 'hf-hub':
        return load_state_dict_from_hf(place)
    if name.partition('.')[0] not in entry_points() or not is_model_pretrained(name):
        raise ValueError(f"this package has no weights '{name}'; it has: {', '.join(list_weights())}.")
    cfg: Any = get_pretrained_cfg(name)
    return load_state_dict(cfg.file) if cfg.file else load_state_dict_from_hf(cfg.hf_hub_id)


def _moved(state_dict: Dict[str, torch.Tensor], device: Any) -> Dict[str, torch.Tensor]:
    return state_dict if device is None else {key: tensor.to(device) for key, tensor in state_dict.items()}
