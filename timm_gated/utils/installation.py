"""Patches of the training frameworks, installed when the first gate or objective is created

Importing this package registers its models and changes nothing that other models use. Building, copying or unpickling a
gate or an objective calls `install`.
"""
import functools
import threading
from typing import Callable, List

__all__ = ['install', 'on_first_use']

_pending: List[Callable[[], None]] = []
_lock = threading.Lock()


def on_first_use(installer: Callable[[], None]) -> Callable[[], None]:
    """Decorator for a function that `install` calls. Further calls have no effect.

    Args:
        installer: Function that patches a framework. The patch must not affect models without gates and objectives.
    """
    once = functools.cache(installer)
    _pending.append(once)
    return once


def install() -> None:
    """Call the functions registered by `on_first_use`."""
    with _lock:  # other threads wait until all patches are installed
        while _pending:
            _pending.pop()()
