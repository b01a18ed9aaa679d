"""Remove filters and gates from a network"""
import copy
from functools import singledispatch
from typing import Any, Dict, Mapping, Optional, Tuple

import timm
import torch
import torch.nn as nn
from timm.models._input import update_model_args

from ..analysis import gate_kinds
from ..layers import ChannelGate, Gating, check_map, gated_channels, gates, inner_channels, narrow_map
from ..models import GatedNet

__all__ = ['blocks_of_gates', 'keep_used_filters', 'without_gates']


def keep_used_filters(
        model: nn.Module,
        open_share: Mapping[str, torch.Tensor],
        threshold: float = 0.99,
        keep_gates: bool = True,
) -> nn.Module:
    """Copy of a network without the filters that are always off, in evaluation mode.

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
        gate: Any = pruned.get_submodule(name)
        kinds = gate_kinds(share, threshold)
        ungated = torch.arange(gate.num_gates, gate.num_gates + gate.num_ungated)
        switched = torch.where(kinds == 1)[0]
        always = torch.cat((torch.where(kinds == 0)[0], ungated))
        if keep_gates:
            keep, num_gates = torch.cat((switched, always)), len(switched)
        else:
            keep, num_gates = torch.cat((switched, always)).sort().values, 0
        narrow_map(pruned.get_submodule(block_name), index, keep, num_gates)
    return _replace_networks(pruned)


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
        if type(gate) is not ChannelGate or index is None or not hasattr(block, f'conv{index + 1}'):
            raise ValueError(
                f"gate '{name}' is a {type(gate).__name__} in a {type(block).__name__}; only inner maps gated by a "
                f'ChannelGate can be pruned.')
        check_map(block, index)
        found[name] = block_name, index
    return found
