"""Export to ONNX and `torch.export`

By default, a gated network is exported with masks: all filters run, and closed ones are multiplied by zero. The
exported network is correct in any runtime, but not faster than the dense one. Prune or specialize the network first to
make it faster, or export it for ONNX Runtime with `conditional=True`: it then computes only open filters.
"""
import copy
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn

from ..layers import gates
from ..utils import new_file, unwrap
from .compiler import compile_trunk, is_plain_classifier
from .conditional_onnx import write_program
from .onnx_graph import check_opset, save_model
from .program import Program
from .trunks import Trunk, complete_trunk

__all__ = ['export_onnx', 'export_program', 'onnx_difference']

PathLike = Union[str, Path]


def export_onnx(
        model: nn.Module,
        path: PathLike,
        input_size: Optional[Sequence[int]] = None,
        opset: int = 23,
        conditional: bool = False,
) -> Path:
    """Export a network to ONNX with a dynamic batch size. The file is written atomically.

    The input is named `images`. The output is named `logits`, or `features0`, `features1`, … if there are several.

    Args:
        model: Network to export. It is exported in evaluation mode and not changed.
        path: File to write.
        input_size: Channels, height and width of the images. Taken from the pretrained config by default.
        opset: ONNX opset version.
        conditional: Whether each image computes only its open filters. The file then has standard operators, but
            weights of a shape that is known at run time: ONNX Runtime runs it, OpenVINO 2026.4 does not. The images of
            a batch run one after another, and an empty batch is an error. The networks that `accelerate` supports can
            be exported, in float32.
    """
    model, images = _prepare(model, input_size)
    if conditional:
        return _export_conditional(model, path, images, opset)
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


def _export_conditional(model: nn.Module, path: PathLike, images: torch.Tensor, opset: int) -> Path:
    program, flat, names = _compile(model)
    in_channels, height, width = images.shape[1:]
    if in_channels != program.in_channels:
        raise ValueError(f'input_size must have the {program.in_channels} channels of the network, got {in_channels}.')
    check_opset(opset)
    graph = write_program(program, height, width, flat, names, opset)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial:
        save_model(graph, partial)
    return Path(path)


def _compile(model: nn.Module) -> Tuple[Program, bool, List[str]]:
    """Compile a whole network. Returns the program, whether its output is a vector, and the names of its outputs."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.dtype is not torch.float32:
            raise ValueError(
                f'conditional=True exports float32 networks, but {name} has {tensor.dtype}. Export model.float().')
    try:
        parts = complete_trunk(model)
        if parts is None or not (parts.head is None or is_plain_classifier(parts.head)):
            part = type(model).__name__
            if parts is not None and parts.head is not None:
                part += f' with {", ".join(map(str, parts.head.children()))}'
            raise ValueError(
                f'{part} cannot be exported. Supported: ResNets of timm and of this package with average pooling, and '
                f'of mmseg after `import mmseg_plugin`, alone or with a PSPHead or FCNHead.')
        flat = parts.head is not None
        program = compile_trunk(_modules(parts))
    except ValueError as error:
        raise ValueError(f'conditional=True: {error} Any network can be exported with conditional=False.') from error
    outputs = parts.assemble([torch.empty(0)] * sum(is_output for _, is_output in _modules(parts)))
    names = ['logits'] if isinstance(outputs, torch.Tensor) else [f'features{i}' for i in range(len(outputs))]
    return program, flat, names


def _modules(parts: Trunk) -> List[Tuple[nn.Module, bool]]:
    """The modules of a trunk, with its head as the only output if there is one."""
    if parts.head is None:
        return list(parts.modules)
    return [*((module, False) for module, _ in parts.modules), (parts.head, True)]


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
