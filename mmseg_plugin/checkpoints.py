"""Checkpoints for mmengine: weights of timm models, safetensors files, atomic writes

    init_cfg=dict(type='Pretrained', checkpoint='timm-gated://gated_resnet20.bas_c10')

The prefix is followed by a name for `timm.create_model`: model and tag of this package (packaged weights need no
network), `local-dir:FOLDER` or `hf-hub:OWNER/NAME`. Parameters are renamed to those of mmseg's backbones, and the
classifier is dropped. Once a gated segmentor is built, paths that end in `.safetensors` load unchanged, like a `.pth`.
Only tensors are read.

mmengine writes checkpoints in place, and rewrites the last one if it is the best; a process killed meanwhile leaves a
truncated file. The file backend `timm_gated_local`, set in our configs, writes files atomically:

    default_hooks = dict(checkpoint=dict(type='CheckpointHook', backend_args=dict(backend='timm_gated_local')))

Once a gated segmentor is built, mmengine can load its own training checkpoints although torch 2.6 and newer default to
`weights_only=True`, and errors about a truncated or missing checkpoint list the complete ones to resume from.
"""
import functools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, Union

import safetensors.torch
import torch
from mmengine.fileio import LocalBackend, register_backend
from mmengine.runner.checkpoint import CheckpointLoader
from mmengine.utils import mkdir_or_exist
from timm.models import (
    get_pretrained_cfg,
    is_model_pretrained,
    load_state_dict,
    load_state_dict_from_hf,
    parse_model_name,
)
from timm.models._hub import load_state_dict_from_path

from timm_gated.models import check_model_name, entry_points, list_weights, rename_linear_head
from timm_gated.utils import cut_explained, explained, new_file, on_first_use, others_beside

from .compat import history_allowed
from .convert import timm_to_mmseg

__all__ = ['WholeFileBackend', 'extend_checkpoint_loader', 'load_from_safetensors', 'load_from_timm_gated']

PREFIX = 'timm-gated://'
# mmengine matches prefixes as regular expressions. Remote files keep the loaders of their own schemes.
_SAFETENSORS = r'(?!\S+://).+\.safetensors$'

_ADVICE = 'To resume a killed training from the newest one, use --resume --cfg-options load_from=PATH'


@register_backend('timm_gated_local')
class WholeFileBackend(LocalBackend):
    """mmengine's local file backend with atomic writes; see `timm_gated.utils.new_file`."""

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        mkdir_or_exist(os.path.dirname(filepath))
        with new_file(filepath) as partial:
            partial.write_bytes(obj)

    def put_text(self, obj: str, filepath: Union[str, Path], encoding: str = 'utf-8') -> None:
        self.put(obj.encode(encoding), filepath)


@on_first_use
def extend_checkpoint_loader() -> None:
    """Let mmengine load its training checkpoints and safetensors files, and add advice to its errors.

    Called when the first segmentor, backbone or hook of this package is built.
    """
    load = CheckpointLoader.load_checkpoint.__func__

    @functools.wraps(load)
    def load_checkpoint(cls: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        path = os.path.expanduser(filename)
        try:
            with cut_explained(path, _ADVICE), history_allowed():
                return load(cls, filename, *args, **kwargs)
        except FileNotFoundError as error:
            if not filename:  # mmengine was killed before it wrote the content of last_checkpoint
                error.add_note(
                    f'The name of the checkpoint is empty. With --resume, this means that the training was killed '
                    f'while it wrote the file last_checkpoint in its work_dir, which holds the checkpoints. {_ADVICE}.')
            # mmengine removes a checkpoint before it writes the next one, so last_checkpoint may name a missing file.
            elif '://' not in path and not os.path.exists(path):
                with suppress(Exception):
                    error.add_note(others_beside(path, _ADVICE))
            raise

    CheckpointLoader.load_checkpoint = classmethod(load_checkpoint)
    CheckpointLoader.register_scheme(_SAFETENSORS, load_from_safetensors, force=True)


@CheckpointLoader.register_scheme(prefixes=PREFIX)
def load_from_timm_gated(filename: str, map_location: Any = None) -> Dict[str, torch.Tensor]:
    """Load the weights of a timm model as the state dict of a backbone.

    Args:
        filename: Name of the weights, with the prefix 'timm-gated://'.
        map_location: Device of the tensors.
    """
    name = filename.removeprefix(PREFIX)
    with explained(f"the weights '{name}' are incomplete or invalid"):
        state_dict = _read(name)
        rename_linear_head(state_dict)
        if not any(key.startswith('layer1.0.conv1.') for key in state_dict):
            raise ValueError(f"the weights '{name}' are not those of a ResNet: they have no layer1.0.conv1.")
        return _moved(timm_to_mmseg(state_dict), map_location)


def load_from_safetensors(filename: str, map_location: Any = None) -> Dict[str, torch.Tensor]:
    """Load a state dict from a local safetensors file.

    Args:
        filename: Path of the file.
        map_location: Device of the tensors.
    """
    path = os.path.expanduser(filename)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'{path} can not be found.')
    return _moved(safetensors.torch.load_file(path), map_location)


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
