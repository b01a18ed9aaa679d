"""Runs tools in this process, which is faster than a subprocess"""
import importlib.util
import sys
from types import ModuleType

from paths import ROOT

TOOLS = ROOT / 'tools'


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f'{name}.py')
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # needed by dataclasses
    spec.loader.exec_module(module)
    return module


def run_tool(name: str, *args) -> int:
    """Run a tool and return its exit status."""
    return load_tool(name).main([str(arg) for arg in args])
