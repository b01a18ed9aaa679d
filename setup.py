"""Packages and native kernels; pyproject.toml has the metadata

The kernels are plain C without Python's API, loaded by path, so one wheel per platform serves every version of Python.
They are optional: without a compiler, the installation continues without them.
"""
import sys
from pathlib import Path
from typing import List, Tuple

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / 'timm_gated' / 'csrc'


class BuildKernels(build_ext):
    """Build the kernels as a shared library, or else warn.

    No flag selects an instruction set: the kernels choose theirs at run time.
    """

    def get_ext_filename(self, fullname: str) -> str:
        return f'{fullname.replace(".", "/")}.so'

    def get_export_symbols(self, ext: Extension) -> List[str]:
        return []  # not PyInit__native

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == 'msvc':
            return self._warn('they need GCC or Clang, not MSVC')
        ext.extra_compile_args = ['-std=gnu11', '-O3', '-fno-math-errno', '-fvisibility=hidden', '-pthread']
        ext.extra_link_args = ['-pthread', '-lm']
        try:
            super().build_extension(ext)
        except Exception as error:  # the type depends on the compiler
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        print(
            f'WARNING: the native kernels of timm-gated were not built ({reason}). Everything works except '
            f"accelerate(backend='native'); accelerate will use the slower torch backend.", file=sys.stderr)


class TaggedWheel(bdist_wheel):
    """Wheel for one platform and every Python 3 or, without kernels, for any platform."""

    def get_tag(self) -> Tuple[str, str, str]:
        has_kernels = any(Path(self.bdist_dir).rglob('_native.so'))
        return 'py3', 'none', super().get_tag()[2] if has_kernels else 'any'


KERNELS = Extension(
    'timm_gated._native',
    sources=sorted(str(path.relative_to(ROOT)) for path in SOURCES.glob('*.c')),
    depends=sorted(str(path.relative_to(ROOT)) for path in SOURCES.glob('*.[hi]*')),
    optional=True,
)

setup(
    packages=[
        *find_packages(include=['timm_gated', 'timm_gated.*', 'mmseg_plugin', 'mmseg_plugin.*']),
        'timm_gated_cli', 'timm_gated_configs'],
    package_dir={'timm_gated_cli': 'tools', 'timm_gated_configs': 'configs'},
    ext_modules=[KERNELS],
    cmdclass={'build_ext': BuildKernels, 'bdist_wheel': TaggedWheel},
)
