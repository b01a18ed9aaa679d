"""The tools, in this process: quicker than as programs of their own"""
import importlib.util
import sys
from types import ModuleType

from paths import ROOT

TOOLS = ROOT / 'tools'


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f'{name}.py')
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # (dataclasses look there)
    spec.loader.exec_module(module)
    return module


def run_tool(name: str, *args) -> int:
    """Exit status of a tool with these arguments."""
    return load_tool(name).main([str(arg) for arg in args])
