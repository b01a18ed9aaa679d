"""The C library without Python, compiled for this machine or, with CC and EMULATOR in the environment, for another one

    CC='aarch64-linux-gnu-gcc -static' EMULATOR=qemu-aarch64 pytest tests/inference/test_c_library.py
"""
import os
import subprocess
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np
import torch
from paths import ROOT

__all__ = ['CSRC', 'EMULATOR', 'OPTIMIZED', 'SANITIZED', 'SOURCES', 'build', 'numbered_images', 'output_of']

CSRC = ROOT / 'timm_gated' / 'csrc'
SOURCES = sorted(CSRC.glob('*.c'))
EMULATOR = os.environ.get('EMULATOR', '').split()
OPTIMIZED = ('-O3', '-fno-math-errno')
# Emulators have no sanitizers. Small blocks, so that most maps need several.
SANITIZED = ('-O1', '-g', '-DCACHE_BYTES=65536', *(
    () if EMULATOR else ('-fsanitize=address,undefined', '-fno-sanitize-recover=all')))


def build(program: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Compile a program; warnings are errors."""
    compiler = os.environ.get('CC', 'gcc').split()
    subprocess.run([
        *compiler, '-std=gnu11', *flags, '-Wall', '-Wextra', '-Werror', f'-I{CSRC}', *sources, '-pthread', '-lm', '-o',
        program], check=True)
    return program


def output_of(program: Path, *args: Any) -> List[str]:
    """Run a program that must succeed and print nothing to stderr; returns the lines it prints."""
    # Errors may quote any bytes of a damaged file.
    done = subprocess.run(
        [*EMULATOR, program, *map(str, args)], capture_output=True, text=True, encoding='latin-1')
    assert done.returncode == 0 and not done.stderr, f'exit code {done.returncode}\n{done.stdout}\n{done.stderr}'
    return done.stdout.removesuffix('\n').split('\n') if done.stdout else []


def numbered_images(*shape: int) -> torch.Tensor:
    """The images that `run_model` runs."""
    values = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2654435761)
    return torch.from_numpy((values / 2 ** 31 - 1).astype(np.float32)).view(shape)
