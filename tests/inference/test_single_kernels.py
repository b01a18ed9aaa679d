"""Each kernel alone against scalar references, under AddressSanitizer and UBSan"""
from c_library import CSRC, EMULATOR, SANITIZED, build, output_of
from paths import ROOT

from timm_gated import instruction_sets


def test_single_kernels(tmp_path):
    sources = [ROOT / 'tests' / 'inference' / 'single_kernels.c', *CSRC.glob('kernels_*.c')]
    lines = output_of(build(tmp_path / 'single_kernels', sources, SANITIZED))
    assert set(lines) == {'portable'} if EMULATOR else set(instruction_sets())
