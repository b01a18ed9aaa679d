"""What mmsegmentation needs to run on the newest torch and numpy, and on mmcv-lite

Imported before anything of `mmseg`. Each item says which upstream change makes it unnecessary.

1. mmcv-lite has no compiled operators, but `mmseg.models` imports `mmcv.ops`, which insists on them. A placeholder for
   `mmcv._ext` lets the import pass; an operator that is really called says what to do. With a full mmcv the
   placeholder stays away. Unnecessary once mmsegmentation (1.2.2) imports `mmcv.ops` only where it uses it.
2. Since torch 2.6 `torch.load` unpickles nothing but tensors unless told otherwise, and mmengine cannot load its own
   training checkpoints, which hold the log's history. While mmengine loads one, and once a gated segmentor is built,
   the types of that history count as safe; the protection stays. Unnecessary once mmengine (0.10.7) declares them.
"""
import importlib.machinery
import importlib.util
import pickle
import sys
import threading
import types
from contextlib import contextmanager
from typing import Any, Iterator, List

import numpy as np
import torch
from mmengine.logging.history_buffer import HistoryBuffer

__all__ = ['history_allowed', 'stand_in_for_compiled_ops']


class _NoCompiledOps(types.ModuleType):
    """Placeholder for `mmcv._ext`: every operator exists, and none can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(
                f"mmcv's compiled operator '{name}' was called, but mmcv-lite has none. Install the full mmcv in its "
                f"place (pip uninstall mmcv-lite; mim install 'mmcv>=2.0.0,<2.2.0'), or choose a model without it.")
        return unavailable


def stand_in_for_compiled_ops() -> bool:
    """Put the placeholder in place where mmcv has no compiled operators; returns whether it is there."""
    name = 'mmcv._ext'
    if name in sys.modules:
        return isinstance(sys.modules[name], _NoCompiledOps)
    if importlib.util.find_spec(name) is not None:
        return False
    placeholder = _NoCompiledOps(name)
    # mmcv looks for a loader to tell whether it has operators: there is none, so it knows.
    placeholder.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    sys.modules[name] = placeholder
    return True


def _statistics_method(owner: Any, name: str) -> Any:
    # A history names its methods by `getattr`, which as it is would open the door to any code.
    if owner is not HistoryBuffer or name not in ('min', 'max', 'current', 'mean'):
        raise pickle.UnpicklingError(f'refused to load: the checkpoint asks for the attribute {name!r} of {owner!r}.')
    return getattr(owner, name)


_HISTORY: List[Any] = [
    HistoryBuffer,
    (_statistics_method, 'builtins.getattr'),
    (_statistics_method, '__builtin__.getattr'),
    np.empty(0).__reduce__()[0],  # numpy's functions that make an array, and a scalar
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in '?bhilqBHILQefd'},
]
_lock = threading.RLock()


@contextmanager
def history_allowed() -> Iterator[None]:
    """Let `torch.load` read what mmengine's checkpoints hold beside tensors: the history of the log, in numpy arrays.

    Example:
        >>> with history_allowed():
        ...     checkpoint = torch.load('iter_4.pth')
    """
    with _lock:  # or one thread would take away what another has just allowed
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([item for item in _HISTORY if item not in allowed]):
            yield


stand_in_for_compiled_ops()
