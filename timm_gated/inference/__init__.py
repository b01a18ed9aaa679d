"""Inference with gated networks: `accelerate` and export"""
from .accelerate import Accelerated, accelerate, accelerated_parts, load_accelerated
from .calibration import batch_images
from .compiler import Compiler, compile_module, compile_trunk, is_plain_conv, sequence
from .export import export_onnx, export_program, onnx_difference
from .native import instruction_sets
from .program import AdaptivePoolOp, ConcatOp, ConvOp, Program
from .sliced import SlicedRunner
from .trunks import Trunk, complete_trunk, find_trunk, first_map, register_forward, trunk

__all__ = [
    'Accelerated',
    'AdaptivePoolOp',
    'Compiler',
    'ConcatOp',
    'ConvOp',
    'Program',
    'SlicedRunner',
    'Trunk',
    'accelerate',
    'accelerated_parts',
    'batch_images',
    'compile_module',
    'compile_trunk',
    'complete_trunk',
    'export_onnx',
    'export_program',
    'find_trunk',
    'first_map',
    'instruction_sets',
    'is_plain_conv',
    'load_accelerated',
    'onnx_difference',
    'register_forward',
    'sequence',
    'trunk',
]
