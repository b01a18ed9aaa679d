"""Weights of timm models, and safetensors files, wherever mmengine takes a checkpoint

    init_cfg=dict(type='Pretrained', checkpoint='timm-gated://gated_resnet20.bas_c10')

After the prefix comes what `timm.create_model` takes for a name: weights of this package by their tag (those inside the
package need no network), `local-dir:FOLDER` or `hf-hub:OWNER/NAME`. They get the names of mmseg's backbones and lose
their classifier. Nothing but tensors is read. Once a gated segmentor is built, files that end in `.safetensors` are
taken as they are, like a `.pth`.

mmengine writes a checkpoint in place, and writes the last one again once it is known to be the best; killed then, a
training could not be resumed. The file backend `timm_gated_local`, which our configs choose, writes files whole or not
at all:

    default_hooks = dict(checkpoint=dict(type='CheckpointHook', backend_args=dict(backend='timm_gated_local')))

Once a gated segmentor is built, mmengine loads its own training checkpoints under torch's protection against code in
them, and its errors over one that is cut short, or gone, have a note on those to go on from.
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
# (mmengine matches prefixes as regular expressions; other places than this machine's have schemes of their own.)
_SAFETENSORS = r'(?!\S+://).+\.safetensors$'

_ADVICE = 'A training that was killed goes on from the newest of its own by --resume --cfg-options load_from=PATH'


@register_backend('timm_gated_local')
class WholeFileBackend(LocalBackend):
    """mmengine's files on this machine, each written whole or not at all; see `timm_gated.utils.new_file`."""

    def put(self, obj: bytes, filepath: Union[str, Path]) -> None:
        mkdir_or_exist(os.path.dirname(filepath))
        with new_file(filepath) as partial:
            partial.write_bytes(obj)

    def put_text(self, obj: str, filepath: Union[str, Path], encoding: str = 'utf-8') -> None:
        self.put(obj.encode(encoding), filepath)


@on_first_use
def extend_checkpoint_loader() -> None:
    """Make mmengine load its training checkpoints and safetensors files, and explain those that do not load.

    The first gated segmentor does it, or the first backbone or hook of this package.
    """
    load = CheckpointLoader.load_checkpoint.__func__

    @functools.wraps(load)
    def load_checkpoint(cls: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
        path = os.path.expanduser(filename)
        try:
            with cut_explained(path, _ADVICE), history_allowed():
                return load(cls, filename, *args, **kwargs)
        except FileNotFoundError as error:
            if not filename:  # what mmengine reads from a last_checkpoint that it was about to write
                error.add_note(
                    f'There is no checkpoint to load: the name is empty. If this is --resume, the training was killed '
                    f'while it wrote the file last_checkpoint in its work_dir, where the checkpoints are. {_ADVICE}.')
            # mmengine removes a checkpoint before it writes the next: killed between, last_checkpoint names none.
            elif '://' not in path and not os.path.exists(path):
                with suppress(Exception):
                    error.add_note(others_beside(path, _ADVICE))
            raise

    CheckpointLoader.load_checkpoint = classmethod(load_checkpoint)
    CheckpointLoader.register_scheme(_SAFETENSORS, load_from_safetensors, force=True)


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
