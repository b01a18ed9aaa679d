"""Packaging of timm-gated, with its native kernels

The version is read from timm_gated/version.py without importing the package. The kernels are plain C and optional: with
no compiler the installation goes on without them.
"""
import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    text = (ROOT / 'timm_gated' / 'version.py').read_text(encoding='utf-8')
    match = re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE)
    if match is None:
        raise RuntimeError('timm_gated/version.py holds no __version__')
    return match.group(1)


def read_readme() -> str:
    path = ROOT / 'README.md'
    return path.read_text(encoding='utf-8') if path.exists() else ''


class BuildKernels(build_ext):
    """Builds the kernels with OpenMP, else without, else says what is lost. Never for one machine's instructions only:
    the kernels choose theirs when they run."""

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == 'msvc':
            return self._go_without("they are written for GCC and Clang, not for Microsoft's compiler")
        flags = ['-std=gnu11', '-O3', '-fno-math-errno', '-fvisibility=hidden']
        for openmp in (['-fopenmp'], []):
            ext.extra_compile_args, ext.extra_link_args = flags + openmp, openmp
            try:
                return super().build_extension(ext)
            except Exception as error:  # each compiler has its own
                reason = error
        return self._go_without(str(reason))

    def _go_without(self, reason: str) -> None:
        print(
            f'WARNING: the native kernels of timm-gated were not built ({reason}). All works but '
            f"accelerate(backend='native'): accelerate will use torch, which is slower.", file=sys.stderr)


SOURCES = ROOT / 'timm_gated' / 'csrc'
KERNELS = Extension(
    'timm_gated._native',
    sources=sorted(str(path.relative_to(ROOT)) for path in SOURCES.glob('*.c')),
    depends=sorted(str(path.relative_to(ROOT)) for path in SOURCES.glob('*.[hi]*')),
    optional=True,
)

INSTALL_REQUIRES = [
    # The lower bounds are those of tests/oldest.txt, which `make oldest` runs the tests with.
    'torch>=2.9.1,!=2.13.*',  # no torchvision matches the CPU build of 2.13
    'torchvision>=0.24.1',
    'timm>=1.0.31',  # records and restores the arguments of a model; evaluators
    'huggingface_hub>=1.20.0',  # compares checksums, and goes on with interrupted downloads
    'safetensors',
    'pyyaml',
    'numpy',
    'tqdm',
]

DEMO = ['matplotlib', 'scikit-learn']
ANALYSIS = ['matplotlib', 'pyarrow', 'scipy']

EXTRAS = {
    'analysis': ANALYSIS,
    # mmengine needs pkg_resources, hence setuptools<81; mmsegmentation refuses mmcv>=2.2 and does not declare ftfy
    # and regex. A full mmcv in place of mmcv-lite works as well.
    'mmseg': [
        'mmsegmentation>=1.2.2,<1.3',
        'mmengine>=0.10.7',
        'mmcv-lite>=2.1.0,<2.2',
        'setuptools<81',
        'ftfy',
        'regex',
    ],
    'bench': ['onnx', 'onnxruntime', 'onnxscript', 'openvino', 'fvcore', 'scipy', *DEMO],
    'dev': [
        'pytest',
        'pytest-xdist',
        'hypothesis',
        'ruff',
        'mypy',
        'fvcore',
        'onnx',
        'onnxscript',
        *ANALYSIS,
        *DEMO,
    ],
}
EXTRAS['all'] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})

setup(
    name='timm-gated',
    version=read_version(),
    description='Channel-gated residual networks with batch-shaping for timm and mmsegmentation',
    long_description=read_readme(),
    long_description_content_type='text/markdown',
    author='The timm-gated authors',
    license='Apache-2.0',
    license_files=['LICENSE'],
    packages=find_packages(include=['timm_gated', 'timm_gated.*', 'mmseg_plugin', 'mmseg_plugin.*']),
    package_data={'timm_gated': ['weights/*']},
    ext_modules=[KERNELS],
    cmdclass={'build_ext': BuildKernels},
    python_requires='>=3.11',
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
