"""What gated trainings change in the frameworks, installed when the first gate or objective is made

Importing this package registers its models and changes nothing that other models use. A gate or an objective that is
built, copied or unpickled calls `install`, and so every gated network does.
"""
import functools
import threading
from typing import Callable, List

__all__ = ['install', 'on_first_use']

_pending: List[Callable[[], None]] = []
_lock = threading.Lock()


def on_first_use(installer: Callable[[], None]) -> Callable[[], None]:
    """Decorator: `install` calls the function; it may be called before that, and takes effect once.

    Args:
        installer: Changes a framework. It must pass on what does not concern gated networks to what was there before.
    """
    once = functools.cache(installer)
    _pending.append(once)
    return once


def install() -> None:
    """Call the functions that are waiting for the first gate or objective."""
    with _lock:  # so that no thread goes on before they are done
        while _pending:
            _pending.pop()()
