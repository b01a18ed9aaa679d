"""Source distribution and wheel: their contents, the tag of the wheel, and its use without this repository"""
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import List, Tuple

import pytest
from paths import ROOT
from tool import TOOLS

# What `python -m build` does, without a new environment
BUILD = 'import sys; from setuptools import build_meta; getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2])'
USE = """
import sys
import timm, timm_gated, timm_gated_cli.configs as configs
assert all(module.__file__.startswith(sys.argv[1]) for module in (timm_gated, configs)), timm_gated.__file__
print(timm_gated.accelerate(timm.create_model('gated_resnet20', pretrained=True)).backend, len(configs.find_configs()))
"""


def build(kind: str, source: Path, target: Path, **env: str) -> Tuple[Path, str]:
    """Build an 'sdist' or a 'wheel' from a folder; returns the file and the warnings."""
    done = subprocess.run(
        [sys.executable, '-c', BUILD, kind, str(target)], cwd=source, env={**os.environ, **env}, capture_output=True,
        text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(target.glob('*.tar.gz' if kind == 'sdist' else '*.whl')), done.stderr


@pytest.fixture(scope='module')
def sdist(tmp_path_factory) -> Path:
    return build('sdist', ROOT, tmp_path_factory.mktemp('sdist'))[0]


@pytest.fixture
def source(sdist, tmp_path) -> Path:
    """Unpacked source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / 'source', filter='data')
    return tmp_path / 'source' / sdist.name.removesuffix('.tar.gz')


def names(folder: Path, pattern: str) -> List[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob(pattern) if path.is_file()]


def test_wheel(source, tmp_path):
    compiler = tmp_path / 'unoptimized'  # builds in a fraction of the time
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "gcc")} "$@" -O0\n')
    compiler.chmod(0o755)
    wheel, _ = build('wheel', source, tmp_path, CC=str(compiler))
    assert wheel.name.split('-')[2:4] == ['py3', 'none'] and not wheel.name.endswith('-any.whl')
    unpacked = tmp_path / 'unpacked'
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    packages = {'timm_gated': 'timm_gated', 'mmseg_plugin': 'mmseg_plugin', 'timm_gated_configs': 'configs'}
    patterns = ('*.py', '*.yaml', '*.md', '*.safetensors', '*.png', 'py.typed')
    expected = {
        f'{package}/{name}' for package, folder in packages.items() for pattern in patterns
        for name in names(ROOT / folder, pattern)}
    expected |= {f'timm_gated_cli/{path.name}' for path in TOOLS.glob('*.py')} | {'timm_gated/_native.so'}
    expected |= {f'timm_gated_cli/explore_page/{name}' for name in names(TOOLS / 'explore_page', '*')}
    assert {name for name in names(unpacked, '*') if '.dist-info/' not in name} == expected
    entry_points, = unpacked.glob('*.dist-info/entry_points.txt')
    assert 'timm-gated = timm_gated_cli.__main__:main' in entry_points.read_text()
    done = subprocess.run(
        [sys.executable, '-c', USE, str(unpacked)], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': str(unpacked)},
        capture_output=True, text=True, timeout=300)
    assert done.stdout == f'native {len(names(ROOT / "configs" / "timm", "*.yaml") + mmseg_configs())}\n', done.stderr


def mmseg_configs() -> List[str]:
    return [name for name in names(ROOT / 'configs' / 'mmseg', '*.py') if not name.startswith('_base_')]


def test_a_wheel_without_a_compiler_is_for_any_platform(source, tmp_path):
    wheel, warnings = build('wheel', source, tmp_path, CC='false')
    assert wheel.name.endswith('-py3-none-any.whl')
    assert 'the native kernels of timm-gated were not built' in warnings
    with zipfile.ZipFile(wheel) as archive:
        assert 'timm_gated/version.py' in archive.namelist() and 'timm_gated/_native.so' not in archive.namelist()
