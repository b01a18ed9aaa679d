"""Runtimes of the inference benchmark

Dense networks run in eager torch, torch.compile, ONNX Runtime, OpenVINO, OpenVINO with int8 weights and activations,
and with our kernels ('native'). Gated networks run masked (all filters are computed) and with both backends of
`accelerate`, 'torch' and 'native'. A native runtime is named with its instruction set, 'native avx512'.
"""
from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

import _bench_quantize

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

__all__ = ['BASELINES', 'DENSE_RUNTIMES', 'INT8', 'Run', 'prepare', 'prepare_onnx', 'quantize']

Run = Callable[[], Any]
BASELINES = ('eager', 'compile', 'onnxruntime', 'openvino')  # dense, float32
INT8 = 'openvino_int8'
DENSE_RUNTIMES = (*BASELINES, INT8)


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
            [sys.executable, str(Path(_bench_quantize.__file__)), str(onnx_path), str(images_path), str(path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=dict(os.environ, NNCF_CI='1'))  # sends no telemetry
        if done.returncode:
            raise RuntimeError(f'NNCF failed to quantise {onnx_path.stem}:\n{done.stdout[-3000:]}')
    return path


def prepare(
        model: nn.Module,
        runtime: str,
        x: torch.Tensor,
        threads: int,
        path: Optional[Path] = None,
) -> Run:
    """Return a function that runs a batch.

    Args:
        model: Network to run.
        runtime: Name of the runtime.
        x: Batch of images.
        threads: Number of threads. Torch and the native kernels use those of `torch.set_num_threads`.
        path: File for ONNX Runtime and OpenVINO: the exported model, or the quantised one.
    """
    import torch

    from timm_gated import accelerate
    if runtime in ('eager', 'masked'):
        return lambda: model(x)
    if runtime == 'compile':
        torch._dynamo.reset()  # past its recompilation limit it would run eagerly
        compiled = torch.compile(model, dynamic=False)
        return lambda: compiled(x)
    backend, _, isa = runtime.partition(' ')
    if backend in ('torch', 'native'):
        fast = accelerate(model, backend, isa or None)
        return lambda: fast(x)
    images = x.numpy()
    if runtime == 'onnxruntime':
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
        name = session.get_inputs()[0].name
        return lambda: session.run(None, {name: images})[0]
    import openvino
    request = openvino.Core().compile_model(str(path), 'CPU', {
        # with the throughput hint, a single request would use one thread
        'INFERENCE_NUM_THREADS': threads, 'PERFORMANCE_HINT': 'LATENCY',
        'INFERENCE_PRECISION_HINT': 'f32'}).create_infer_request()  # of the operations that are not quantised
    return lambda: request.infer({0: images}, share_inputs=True, share_outputs=True)[0]
