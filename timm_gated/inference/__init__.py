"""Inference that skips what gates switch off"""
from .accelerate import Accelerated, accelerate
from .native import instruction_sets

__all__ = ['Accelerated', 'accelerate', 'instruction_sets']
