"""Export to ONNX and `torch.export`

A gated network is exported with masks: all filters run, and closed ones are multiplied by zero. The exported network is
correct in any runtime, but not faster than the dense one. Prune or specialize the network first to make it faster.
"""
import copy
from pathlib import Path
from typing import Any, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn

from ..layers import gates
from ..utils import new_file, unwrap

__all__ = ['export_onnx', 'export_program', 'onnx_difference']

PathLike = Union[str, Path]


def export_onnx(
        model: nn.Module,
        path: PathLike,
        input_size: Optional[Sequence[int]] = None,
        opset: int = 23,
) -> Path:
    """Export a network to ONNX with a dynamic batch size. The file is written atomically.

    The input is named `images`. The output is named `logits`, or `features0`, `features1`, … if there are several.

    Args:
        model: Network to export. It is exported in evaluation mode and not changed.
        path: File to write.
        input_size: Channels, height and width of the images. Taken from the pretrained config by default.
        opset: ONNX opset version.
    """
    model, images = _prepare(model, input_size)
    if images.dtype is torch.bfloat16:
        raise ValueError(
            'bfloat16 networks cannot be exported: torch mixes bfloat16 and float32, which ONNX does not allow. '
            'Export model.float() or model.half() instead.')
    with torch.no_grad():
        outputs = model(images)
    names = ['logits'] if isinstance(outputs, torch.Tensor) else [f'features{i}' for i in range(len(outputs))]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial:
        torch.onnx.export(
            model, (images,), str(partial), dynamo=True, dynamic_shapes=_dynamic_batch(), input_names=['images'],
            output_names=names, opset_version=opset, external_data=False, verbose=False)
    return Path(path)


def export_program(model: nn.Module, path: PathLike, input_size: Optional[Sequence[int]] = None) -> Path:
    """Export a network as a `torch.export` program (`.pt2`) with a dynamic batch size.

    Args:
        model: Network to export. It is exported in evaluation mode and not changed.
        path: File to write.
        input_size: Channels, height and width of the images. Taken from the pretrained config by default.
    """
    model, images = _prepare(model, input_size)
    program = torch.export.export(model, (images,), dynamic_shapes=_dynamic_batch())
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial:
        torch.export.save(program, str(partial))
    return Path(path)


@torch.no_grad()
def onnx_difference(path: PathLike, model: nn.Module, images: torch.Tensor) -> float:
    """Return the largest difference between the outputs of ONNX Runtime and torch, relative if outputs exceed 1.

    Args:
        path: ONNX file of the model.
        model: Model in evaluation mode.
        images: Batch of images.
    """
    import onnxruntime  # optional dependency
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    actual = session.run(None, {'images': images.cpu().numpy()})
    outputs = model(images)
    expected = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return max(
        float((torch.from_numpy(ours) - theirs.cpu()).abs().max() / theirs.abs().max().clamp(min=1).cpu())
        for ours, theirs in zip(actual, expected, strict=True))


def _prepare(model: nn.Module, input_size: Optional[Sequence[int]]) -> Tuple[nn.Module, torch.Tensor]:
    if input_size is None:
        config: Any = getattr(model, 'pretrained_cfg', {})
        if 'input_size' not in config:
            raise ValueError(f'{type(model).__name__} has no default input_size; pass one, for example (3, 224, 224).')
        input_size = (getattr(model, 'in_chans', config['input_size'][0]), *config['input_size'][1:])
    if len(input_size) != 3 or min(input_size) < 1:
        raise ValueError(f'input_size must be channels, height and width, got {tuple(input_size)}.')
    forced = {name: gate.forced for name, gate in gates(model)}  # deepcopy drops it
    model = copy.deepcopy(unwrap(model))
    for name, gate in gates(model):
        gate.forced = forced[name]
    model.eval()
    parameter = next(model.parameters())
    return model, torch.zeros(2, *input_size, device=parameter.device, dtype=parameter.dtype)


def _dynamic_batch() -> Any:
    return ({0: torch.export.Dim('batch')},)
