"""Networks as files for other runtimes: ONNX graphs and `torch.export` programs

A gated network is exported with masks: every filter runs, and closed ones are multiplied by zero. That is right in any
runtime, but no faster. What makes such a file faster is pruning or specialising the network first.
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
    """Write a network as an ONNX file, for batches of any size. The file is written whole or not at all.

    The input is called `images`, the output `logits`, or `features0`, `features1` … if there are several.

    Args:
        model: The network; it is exported in evaluation mode, and not changed.
        path: The file.
        input_size: Channels, height and width of the images; by default those of the model's pretrained config.
        opset: Version of ONNX's operators.
    """
    model, images = _prepare(model, input_size)
    if images.dtype is torch.bfloat16:
        raise ValueError(
            'torch writes a network in bfloat16 with float32 among its types, which ONNX does not allow. Export '
            'model.float() or model.half() instead.')
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
    """Write a network as a `torch.export` program (`.pt2`), for batches of any size; `torch.export.load` reads it.

    Args:
        model: The network; it is exported in evaluation mode, and not changed.
        path: The file.
        input_size: Channels, height and width of the images; by default those of the model's pretrained config.
    """
    model, images = _prepare(model, input_size)
    program = torch.export.export(model, (images,), dynamic_shapes=_dynamic_batch())
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial:
        torch.export.save(program, str(partial))
    return Path(path)


@torch.no_grad()
def onnx_difference(path: PathLike, model: nn.Module, images: torch.Tensor) -> float:
    """The largest difference between outputs in ONNX Runtime and in torch, relative to outputs above 1.

    Args:
        path: ONNX file of the model.
        model: The model, in evaluation mode.
        images: A batch.
    """
    import onnxruntime  # (an extra: exporting itself needs none)
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
            raise ValueError(f'this {type(model).__name__} does not say its input_size: give one, as (3, 224, 224).')
        input_size = (getattr(model, 'in_chans', config['input_size'][0]), *config['input_size'][1:])
    if len(input_size) != 3 or min(input_size) < 1:
        raise ValueError(f'input_size must be channels, height and width, got {tuple(input_size)}.')
    forced = {name: gate.forced for name, gate in gates(model)}  # which copies lose
    model = copy.deepcopy(unwrap(model))
    for name, gate in gates(model):
        gate.forced = forced[name]
    model.eval()
    parameter = next(model.parameters())
    return model, torch.zeros(2, *input_size, device=parameter.device, dtype=parameter.dtype)


def _dynamic_batch() -> Any:
    return ({0: torch.export.Dim('batch')},)
