"""Compatibility of mmsegmentation with recent torch and numpy, and with mmcv-lite

Must be imported before `mmseg`. Each item names the upstream change that makes it unnecessary.

1. mmcv-lite has no compiled operators, but `mmseg.models` imports `mmcv.ops`, which requires them. A placeholder for
   `mmcv._ext` makes the import succeed; calling one of its operators raises an error. It is not used with the full
   mmcv. Unnecessary once mmsegmentation (1.2.2) imports `mmcv.ops` only where it is used.
2. Since torch 2.6 `torch.load` defaults to `weights_only=True`, and mmengine cannot load its own training checkpoints,
   which contain the history of the log. Once a gated segmentor is built, the types of that history count as safe while
   mmengine loads a checkpoint. Unnecessary once mmengine (0.10.7) declares them safe.
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
    """Placeholder for `mmcv._ext` whose operators raise an error when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)

        def unavailable(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(
                f"mmcv-lite does not have the compiled operator '{name}'. Replace it with the full mmcv (pip uninstall "
                f"mmcv-lite; mim install 'mmcv>=2.0.0,<2.2.0'), or choose a model that does not use the operator.")
        return unavailable


def stand_in_for_compiled_ops() -> bool:
    """Install the placeholder if mmcv has no compiled operators; return whether it is installed."""
    name = 'mmcv._ext'
    if name in sys.modules:
        return isinstance(sys.modules[name], _NoCompiledOps)
    if importlib.util.find_spec(name) is not None:
        return False
    placeholder = _NoCompiledOps(name)
    # mmcv looks for a loader to check whether it has compiled operators.
    placeholder.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    sys.modules[name] = placeholder
    return True


def _statistics_method(owner: Any, name: str) -> Any:
    # A pickled history refers to its methods by `getattr`; allowing any attribute would allow arbitrary code.
    if owner is not HistoryBuffer or name not in ('min', 'max', 'current', 'mean'):
        raise pickle.UnpicklingError(f'refused to load: the checkpoint refers to the attribute {name!r} of {owner!r}.')
    return getattr(owner, name)


_HISTORY: List[Any] = [
    HistoryBuffer,
    (_statistics_method, 'builtins.getattr'),
    (_statistics_method, '__builtin__.getattr'),
    np.empty(0).__reduce__()[0],  # numpy's constructors of arrays and scalars
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in '?bhilqBHILQefd'},
]
_lock = threading.RLock()


@contextmanager
def history_allowed() -> Iterator[None]:
    """Let `torch.load` read the history of the log in mmengine's checkpoints, which consists of numpy arrays.

    Examples:
        >>> with history_allowed():
        ...     checkpoint = torch.load('iter_4.pth')
    """
    with _lock:  # safe_globals restores the previous list, which would undo what another thread has allowed
        allowed = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([item for item in _HISTORY if item not in allowed]):
            yield


stand_in_for_compiled_ops()
