"""Each kernel alone against scalar references, under AddressSanitizer and UBSan"""
import os
import subprocess

from paths import ROOT

from timm_gated import instruction_sets

CSRC = ROOT / 'timm_gated' / 'csrc'


def test_single_kernels(tmp_path):
    program = tmp_path / 'single_kernels'
    subprocess.run([
        os.environ.get('CC', 'gcc'), '-std=gnu11', '-O1', '-g', '-fsanitize=address,undefined',
        '-fno-sanitize-recover=all', '-Wall', '-Wextra', '-Werror', f'-I{CSRC}',
        ROOT / 'tests/inference/single_kernels.c', *sorted(CSRC.glob('kernels_*.c')), '-lm', '-o', program], check=True)
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert set(done.stdout.split()) == set(instruction_sets())
