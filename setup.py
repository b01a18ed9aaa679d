"""Packaging of timm-gated. The version is read from timm_gated/version.py without importing the package."""
import re
from pathlib import Path

from setuptools import find_packages, setup

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


INSTALL_REQUIRES = [
    'torch>=2.7,!=2.13.*',  # no torchvision matches the CPU build of 2.13
    'torchvision',
    'timm>=1.0.30',
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
    python_requires='>=3.10',
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    classifiers=[
        'Development Status :: 4 - Beta',
        'Intended Audience :: Science/Research',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
