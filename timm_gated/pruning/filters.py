"""Remove filters and gates from a network"""
import copy
from functools import singledispatch
from typing import Any, Dict, Mapping, Optional, Tuple

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models._input import update_model_args

from ..analysis import gate_kinds
from ..layers import ChannelGate, Gating, check_map, gated_channels, gates, inner_channels, map_groups, narrow_map
from ..models import GatedNet

__all__ = ['blocks_of_gates', 'keep_used_filters', 'without_gates']


def keep_used_filters(
        model: nn.Module,
        open_share: Mapping[str, torch.Tensor],
        threshold: float = 0.99,
        keep_gates: bool = True,
) -> nn.Module:
    """Copy of a network without the filters that are always off, in evaluation mode.

    Groups of a grouped convolution keep equally many filters, so some that are always off remain. There, a map loses
    its gates only if none of them is conditional.

    Args:
        model: Network with channel gates.
        open_share: Share of inputs for which each gate is open, [num_gates], by name of the gate module.
        threshold: Share above which a gate counts as always off or always on.
        keep_gates: Keep conditional gates. Otherwise their filters always run.
    """
    blocks = blocks_of_gates(model)
    for name, share in open_share.items():
        if name not in blocks or share.shape != (model.get_submodule(name).num_gates,):
            raise ValueError(
                f"open_share has {list(share.shape)} for '{name}'; it must have one share per gate of one of the "
                f'modules {", ".join(blocks)}.')
    pruned = copy.deepcopy(model)
    pruned.eval()  # not chained: eval() of mmseg's backbones returns None
    for name, share in open_share.items():
        block_name, index = blocks[name]
        block: Any = pruned.get_submodule(block_name)
        share = F.pad(share, (0, pruned.get_submodule(name).num_ungated), value=1.)  # type: ignore[arg-type]
        kinds = gate_kinds(share, threshold)
        keep = _used_channels(share, kinds, map_groups(block, index))
        closed = kinds[keep] == 2
        num_gates = 0
        if keep_gates and (kinds[keep] == 1).any():
            num_gates = len(keep)
            if map_groups(block, index) == 1:  # those without a gate come last
                keep = keep[kinds[keep].argsort(descending=True, stable=True)]
                num_gates = int((kinds == 1).sum())
        narrow_map(block, index, keep, num_gates, closed if not num_gates else None)
    return _replace_networks(pruned)


def _used_channels(share: torch.Tensor, kinds: torch.Tensor, groups: int) -> torch.Tensor:
    """Channels that are not always off, in order. Each group keeps as many as the largest, and at least one."""
    used = (kinds != 2).view(groups, -1)
    count = max(int(used.sum(1).max()), 1)
    ranked = (used + share.view(groups, -1)).argsort(dim=1, descending=True, stable=True)
    starts = torch.arange(0, len(kinds), used.shape[1])[:, None]
    return (ranked[:, :count].sort(dim=1).values + starts).flatten()


@singledispatch
def without_gates(network: nn.Module) -> Optional[nn.Module]:
    """Replace a pruned network by its dense counterpart if it has no gates left.

    A network that still has gates is returned itself, with updated options for rebuilding it. Returns None for modules
    that are not gated networks. Other packages can register their network classes.
    """
    return None


@without_gates.register
def _(network: GatedNet) -> nn.Module:
    widths = inner_channels(network)
    if gates(network):
        update_model_args(network, inner_channels=widths, gated_channels=gated_channels(network))
        return network
    args = {**network.dense_args, 'inner_channels': widths, 'num_classes': network.num_classes}
    dense: Any = timm.create_model(network.dense_variant, **args)
    _move_layers(network, dense)
    dense.pretrained_cfg = {**network.pretrained_cfg, 'architecture': network.dense_variant}
    return dense.eval()


def _move_layers(source: nn.Module, target: nn.Module) -> None:
    """Move the layers of a gated network to its dense counterpart: the same module objects, not copies."""
    for name, child in target.named_children():
        own = getattr(source, name)
        if any(isinstance(module, Gating) for module in own.modules()):
            _move_layers(own, child)
        else:
            setattr(target, name, own)


def _replace_networks(model: nn.Module) -> nn.Module:
    replacement = without_gates(model)
    if replacement is not None:
        return replacement
    for name, child in model.named_children():
        setattr(model, name, _replace_networks(child))
    return model


def blocks_of_gates(model: nn.Module) -> Dict[str, Tuple[str, int]]:
    """Block name and number of the inner map of each gate."""
    found = {}
    for name, gate in gates(model):
        block_name, _, own_name = name.rpartition('.')
        block = model.get_submodule(block_name)
        index = next((i for i in (1, 2) if own_name == f'gate{i}'), None)
        switched = {
            (conv, side) for conv, pair in getattr(block, 'gated_convs', {}).items()
            for side, other in enumerate(pair) if other is gate}
        if type(gate) is not ChannelGate or index is None \
                or switched != {(f'conv{index}', 1), (f'conv{index + 1}', 0)}:
            raise ValueError(
                f"gate '{name}' is a {type(gate).__name__} in a {type(block).__name__}; only inner maps gated by a "
                f'ChannelGate can be pruned: gate1 between conv1, with the norm bn1, and conv2, or gate2 between conv2 '
                f'and conv3.')
        check_map(block, index)
        found[name] = block_name, index
    return found
