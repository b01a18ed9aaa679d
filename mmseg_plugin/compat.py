"""What mmsegmentation needs to run on the newest torch and numpy, and on mmcv-lite

Imported before anything of `mmseg`. Each item says which upstream change makes it unnecessary.

1. mmcv-lite has no compiled operators, but `mmseg.models` imports `mmcv.ops`, which insists on them. A placeholder for
   `mmcv._ext` lets the import pass; an operator that is really called says what to do. With a full mmcv the
   placeholder stays away. Unnecessary once mmsegmentation (1.2.2) imports `mmcv.ops` only where it uses it.
2. Since torch 2.6 `torch.load` unpickles nothing but tensors unless told otherwise, and mmengine cannot resume its own
   checkpoints, which hold the log's history. The types of that history are declared safe; the protection stays.
   Unnecessary once mmengine (0.10.7) declares them itself.
"""
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import numpy as np
import torch

__all__ = ['allow_own_checkpoints', 'stand_in_for_compiled_ops']


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


def allow_own_checkpoints() -> None:
    """Declare safe what mmengine's checkpoints hold beside tensors: the history of the log, in numpy arrays."""
    from mmengine.logging.history_buffer import HistoryBuffer

    def statistics_method(owner: Any, name: str) -> Any:
        # A history names its methods by `getattr`, which as it is would open the door to any code.
        if owner is not HistoryBuffer or name not in ('min', 'max', 'current', 'mean'):
            raise ValueError(f'refused to load: the checkpoint asks for the attribute {name!r} of {owner!r}.')
        return getattr(owner, name)

    reconstruct: Any = np.empty(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = {type(np.dtype(code)) for code in '?bhilqBHILQefd'}
    torch.serialization.add_safe_globals([
        HistoryBuffer, (statistics_method, 'builtins.getattr'), (statistics_method, '__builtin__.getattr'),
        reconstruct, scalar, np.ndarray, np.dtype, *dtypes])


stand_in_for_compiled_ops()
allow_own_checkpoints()
