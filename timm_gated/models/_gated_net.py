"""Base of all gated networks"""
from typing import Any, Callable, Dict, Optional, Set

import torch
import torch.nn as nn

from ..layers import Channels, Gate, narrow_maps
from ..loss import GateLosses, MacBudget, Objective, objectives
from ._checkpoint import check_incoming

__all__ = ['GatedNet']


class GatedNet(nn.Module):
    """Mixin over a ResNet of gated blocks.

    Args:
        *args: Arguments of the ResNet.
        objective: Factory of the objective. timm's training tasks add its loss terms to the task loss.
        budget: Target share of the dense counterpart's MACs (see `MacBudget`), no budget by default.
        budget_weight: Weight of the budget loss.
        gather_gates: In distributed training, compute gate losses and gate statistics over the batch of all processes.
            By default each process uses its own batch, as in the paper.
        inner_channels: Widths of the blocks' inner maps after pruning (see `timm_gated.layers.narrow`).
        gated_channels: Number of gated channels in these maps.
        **kwargs: Keyword arguments of the ResNet.

    Attributes:
        dense_variant: Entry point of the dense counterpart.
        dense_args: Options of the dense counterpart.
    """

    dense_variant: str
    dense_args: Dict[str, Any]
    pretrained_cfg: Dict[str, Any]
    num_classes: int

    def __init__(
            self,
            *args,
            objective: Optional[Callable[[], Objective]] = GateLosses,
            budget: Optional[float] = None,
            budget_weight: Optional[float] = None,
            gather_gates: bool = False,
            inner_channels: Optional[Channels] = None,
            gated_channels: Optional[Channels] = None,
            **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._equip(objective, budget, budget_weight, gather_gates, inner_channels, gated_channels)

    def _equip(
            self,
            objective: Optional[Callable[[], Objective]] = GateLosses,
            budget: Optional[float] = None,
            budget_weight: Optional[float] = None,
            gather_gates: bool = False,
            inner_channels: Optional[Channels] = None,
            gated_channels: Optional[Channels] = None,
    ) -> None:
        """Narrow the blocks and add the objectives. Called once the network has all of its blocks."""
        narrow_maps(self, inner_channels, gated_channels)
        self.link_gates()
        # The last children: timm's feature extraction runs children in order, up to the last one it needs.
        if objective is not None:
            self.gate_losses = objective()
            self.gate_losses.attach(self)
        if budget is not None:
            self.mac_budget = MacBudget(budget, **({} if budget_weight is None else dict(budget_weight=budget_weight)))
        elif budget_weight is not None:
            raise ValueError(f'budget_weight needs a budget, got {budget_weight} and none.')
        if not isinstance(gather_gates, bool):
            raise ValueError(f'gather_gates must be True or False, got {gather_gates!r}.')
        for module in objectives(self):
            module.gather_gates = gather_gates

    def link_gates(self) -> None:
        """Let gates share modules, if the method needs it. Called after all gates are built."""

    @torch.jit.ignore
    def no_weight_decay(self) -> Set[str]:
        return {
            f'{name}.{parameter}'
            for name, module in self.named_modules() if isinstance(module, (Gate, Objective))
            for parameter, _ in module.named_parameters()
        }

    def _load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        check_incoming(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
