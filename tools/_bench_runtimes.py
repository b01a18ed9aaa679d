"""Runtimes of the inference benchmark

Dense networks run in eager torch, torch.compile, ONNX Runtime, OpenVINO, OpenVINO with int8 weights and activations,
and with our kernels ('native'). Gated networks run masked (all filters are computed) and with both backends of
`accelerate`, 'torch' and 'native'. A native runtime is named with its instruction set and, unless it is float32, its
precision: 'native avx512', 'native avx512 int8'.
"""
from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

from timm_gated_cli._options import Progress

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

__all__ = [
    'BASELINES', 'DENSE_RUNTIMES', 'INT8', 'Run', 'is_int8', 'limit_onednn', 'prepare', 'prepare_onnx', 'quantize',
]

Run = Callable[['torch.Tensor'], Any]
BASELINES = ('eager', 'compile', 'onnxruntime', 'openvino')  # dense, float32
INT8 = 'openvino_int8'
DENSE_RUNTIMES = (*BASELINES, INT8)

_ONEDNN_NAMES = {'avxvnni': 'AVX2_VNNI', 'avx2': 'AVX2'}


def is_int8(runtime: str) -> bool:
    """Whether a runtime computes convolutions in int8."""
    return runtime == INT8 or runtime.endswith(' int8')


def limit_onednn(isa: Sequence[str]) -> None:
    """Limit torch and OpenVINO to an instruction set, if our kernels use only this one.

    Call it before torch is imported. Both use oneDNN, which reads a variable of the environment; one that is already
    set is kept. ONNX Runtime cannot be limited, nor can OpenVINO to less than AVX2.

    Args:
        isa: Instruction sets of the native kernels.
    """
    name = _ONEDNN_NAMES.get(isa[0]) if len(isa) == 1 else None
    if name is not None:
        os.environ.setdefault('ONEDNN_MAX_CPU_ISA', name)


def prepare_onnx(model: nn.Module, x: torch.Tensor, path: Path) -> Path:
    """Export a model for batches like `x`, unless the file exists."""
    import torch
    if not path.exists():
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            torch.onnx.export(model, (x,), str(path), dynamo=True, verbose=False)
    return path


def quantize(onnx_path: Path, images: torch.Tensor) -> Path:
    """Quantise an exported model to int8 for OpenVINO, unless that was done before.

    Args:
        onnx_path: Model exported for one image.
        images: Images to calibrate on.
    """
    import numpy as np
    path = onnx_path.with_suffix('.int8.xml')
    if not path.exists():
        images_path = onnx_path.with_suffix('.npy')
        np.save(images_path, images.numpy())
        done = subprocess.run(
            [sys.executable, '-m', 'timm_gated_cli._bench_quantize', str(onnx_path), str(images_path), str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=dict(os.environ, NNCF_CI='1'))  # sends no telemetry
        if done.returncode:
            raise RuntimeError(f'NNCF failed to quantise {onnx_path.stem}:\n{done.stdout[-3000:]}')
    return path


def prepare(
        model: nn.Module,
        runtime: str,
        threads: int,
        path: Optional[Path] = None,
        calibration: Optional[torch.Tensor] = None,
) -> Callable[[torch.Tensor], Any]:
    """Return a function that runs batches of one size.

    Args:
        model: Network to run.
        runtime: Name of the runtime.
        threads: Number of threads. Torch and the native kernels use those of `torch.set_num_threads`.
        path: File for ONNX Runtime and OpenVINO: the exported model, or the quantised one.
        calibration: Images to calibrate our kernels on in int8.
    """
    import torch

    from timm_gated import accelerate
    if runtime in ('eager', 'masked'):
        return model
    if runtime == 'compile':
        torch._dynamo.reset()  # past its recompilation limit it would run eagerly
        return torch.compile(model, dynamic=False)
    backend, isa, *_ = *runtime.split(), None
    if backend in ('torch', 'native'):
        options = {}
        if is_int8(runtime):
            images = Progress(calibration.split(1), 'ranges for int8', 'image', leave=False)
            options = dict(precision='int8', calibration=images)
        return accelerate(model, backend, isa, **options)
    if runtime == 'onnxruntime':
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
        name = session.get_inputs()[0].name
        return lambda images: session.run(None, {name: images.numpy()})[0]
    import openvino
    request = openvino.Core().compile_model(str(path), 'CPU', {
        # with the throughput hint, a single request would use one thread
        'INFERENCE_NUM_THREADS': threads, 'PERFORMANCE_HINT': 'LATENCY',
        'INFERENCE_PRECISION_HINT': 'f32'}).create_infer_request()  # of the operations that are not quantised
    return lambda images: request.infer({0: images.numpy()}, share_inputs=True, share_outputs=True)[0]
