"""Runs commands and scripts of `tools` in this process, which is faster than a subprocess"""
import importlib
from pathlib import Path
from types import ModuleType

from paths import ROOT

import timm_gated_cli

TOOLS = ROOT / 'tools'
DEVELOPER = sorted(path.stem for path in (TOOLS / 'dev').glob('*.py'))

assert Path(timm_gated_cli.__path__[0]).resolve() == TOOLS, (
    f'timm_gated_cli is {timm_gated_cli.__path__[0]}: install this repository with pip install -e, or put links '
    f'timm_gated_cli and timm_gated_configs to its tools and configs on PYTHONPATH')


def load_tool(name: str) -> ModuleType:
    return importlib.import_module(name if name in DEVELOPER else f'timm_gated_cli.{name}')


def run_tool(name: str, *args) -> int:
    """Run a command or script and return its exit code."""
    return load_tool(name).main([str(arg) for arg in args])
