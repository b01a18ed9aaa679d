"""Build of the native kernels; pyproject.toml has the metadata

The kernels are plain C and optional: without a compiler, the installation continues without them.
"""
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / 'timm_gated' / 'csrc'


class BuildKernels(build_ext):
    """Build the kernels, or else warn.

    No flag selects an instruction set: the kernels choose theirs at run time.
    """

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == 'msvc':
            return self._warn('they need GCC or Clang, not MSVC')
        ext.extra_compile_args = ['-std=gnu11', '-O3', '-fno-math-errno', '-fvisibility=hidden', '-pthread']
        ext.extra_link_args = ['-pthread']
        try:
            super().build_extension(ext)
        except Exception as error:  # the type depends on the compiler
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        print(
            f'WARNING: the native kernels of timm-gated were not built ({reason}). Everything works except '
            f"accelerate(backend='native'); accelerate will use the slower torch backend.", file=sys.stderr)


KERNELS = Extension(
    'timm_gated._native',
    sources=sorted(str(path.relative_to(ROOT)) for path in SOURCES.glob('*.c')),
    depends=sorted(str(path.relative_to(ROOT)) for path in SOURCES.glob('*.[hi]*')),
    optional=True,
)

setup(ext_modules=[KERNELS], cmdclass={'build_ext': BuildKernels})
