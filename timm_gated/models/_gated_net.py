"""What all gated networks have in common, whatever their ResNet"""
from typing import Any, Callable, Dict, Optional, Set, Tuple

import torch
import torch.nn as nn

from ..layers import Channels, Gate, narrow_maps
from ..loss import GateLosses, MacBudget, Objective, objectives
from ._checkpoint import check_incoming

__all__ = ['GatedNet']


class GatedNet(nn.Module):
    """Mixin that turns a ResNet of gated blocks into a gated network.

    Args:
        *args: Of the ResNet.
        objective: Makes what the network is trained with beside its task loss, which the stock training tasks add.
        budget: Share of the plain network's MACs to aim at as well, see `MacBudget`; none by default.
        budget_weight: Weight of that loss.
        gather_gates: In a training on several processes, compute the losses on gates and what is logged of them over
            the batch of all, as one process with the whole batch would. By default each has its own batch shaping, as
            in the paper.
        inner_channels: Widths of the blocks' inner maps (see `timm_gated.layers.narrow`), after pruning.
        gated_channels: How many of their channels have gates.
        **kwargs: Of the ResNet.

    Attributes:
        gating_options: Names of the options that the same network without gates does not have.
        dense_variant: Entry point of the same network without gates.
        dense_args: Its options.
    """

    gating_options: Tuple[str, ...] = ('gated_channels', 'budget', 'budget_weight', 'gather_gates')
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
        narrow_maps(self, inner_channels, gated_channels)
        self.link_gates()
        # Last of the children: timm's feature extraction runs them in order, up to the last one it needs.
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
        """Make gates known to one another, where a method has them share something. Called once all are there."""

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
