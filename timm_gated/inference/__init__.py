"""Inference with gated networks: `accelerate` and export"""
from .accelerate import Accelerated, accelerate
from .compiler import Trunk, compile_trunk, register_forward, trunk
from .export import export_onnx, export_program, onnx_difference
from .native import instruction_sets
from .program import ConvOp, Program
from .sliced import SlicedRunner

__all__ = [
    'Accelerated',
    'ConvOp',
    'Program',
    'SlicedRunner',
    'Trunk',
    'accelerate',
    'compile_trunk',
    'export_onnx',
    'export_program',
    'instruction_sets',
    'onnx_difference',
    'register_forward',
    'trunk',
]
