"""Speed of a gated network beside its dense counterpart, shared by the tools"""
from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

__all__ = ['dense_counterpart', 'time_in_turns']


def dense_counterpart(network: Any) -> Optional[nn.Module]:
    """Create the dense counterpart of a gated network, with its weights. None if the network has no counterpart."""
    import timm

    from timm_gated import GatedNet
    if not isinstance(network, GatedNet):
        return None
    args = {**network.dense_args, 'num_classes': network.num_classes}
    dense = timm.create_model(network.dense_variant, **args).eval()
    names = dense.state_dict().keys()
    dense.load_state_dict({name: value for name, value in network.state_dict().items() if name in names}, strict=False)
    return dense


def time_in_turns(sides: Dict[str, nn.Module], images: Iterable[torch.Tensor]) -> Dict[str, float]:
    """Return the median milliseconds per image of each side at batch 1.

    Each image runs on all sides in random order, so that a disturbance of the machine affects all of them.
    """
    import torch
    order = random.Random(0)
    times: Dict[str, List[float]] = {name: [] for name in sides}
    with torch.inference_mode():
        for image in images:
            for name in order.sample(list(sides), len(sides)):
                time.sleep(0.03)  # idle threads of the previous side spin for a while
                sides[name](image[None])  # warm the caches
                start = time.perf_counter()
                sides[name](image[None])
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}
