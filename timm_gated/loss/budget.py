"""A budget of MACs as a loss

One asks for a share of the plain network's MACs, such as half of them, instead of tuning the weight of a sparsity loss:
lambda * (F / F0 - t)^2, with F the MACs that a training batch used on average, F0 those of the plain network and t the
budget.

Paper: Dynamic Dual Gating Neural Networks (DGNet, https://openaccess.thecvf.com/content/ICCV2021/html/
    Li_Dynamic_Dual_Gating_Neural_Networks_ICCV_2021_paper.html)

F is what `count_macs` would count for the decisions of the batch, the overhead of the gates included; its gradient is
that of the gates' masks. Training decides with noise and evaluation without, so the two may differ in what they use.
"""
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
import torch.nn as nn

from ..layers import MacFormula, gate_masks, mac_formula
from ..utils import check_number
from .objective import Objective, Step, Term

__all__ = ['budget_loss', 'MacBudget']


def budget_loss(used: torch.Tensor, dense: int, budget: float) -> torch.Tensor:
    """Squared distance of the share of MACs that a batch used from a budget.

    Args:
        used: MACs of each sample, [N].
        dense: MACs of a sample in the plain network.
        budget: Share of them to aim at.
    """
    return (used.mean() / dense - budget) ** 2


class MacBudget(Objective):
    """Drives the mean MACs of a network's training batches to a share of the plain network's.

    Args:
        budget: Share to aim at, above 0 and at most 1.
        budget_weight: Weight of the loss (lambda).
    """

    def __init__(self, budget: float = 0.5, budget_weight: float = 10.) -> None:
        super().__init__()
        self.budget = check_number(budget, 'budget', above=0, maximum=1)
        self.budget_weight = check_number(budget_weight, 'budget_weight', minimum=0)
        self._formulas: Dict[Any, MacFormula] = {}
        self._share: Dict[str, torch.Tensor] = {}

    def extra_repr(self) -> str:
        return f'budget={self.budget}, budget_weight={self.budget_weight}'

    def terms(self, model: nn.Module, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        if step is None:
            raise ValueError('what images cost depends on their size: a MacBudget needs the step, got none.')
        network = next(module for module in model.modules() if any(child is self for child in module.children()))
        masks = gate_masks(network)
        formula = self._formula(network, tuple(step.input.shape[1:]), masks)
        used = self.gathered(formula.used(masks))
        self._share = {'macs_share': used.detach().mean() / formula.dense}
        return {'budget_loss': Term(budget_loss(used, formula.dense, self.budget), self.budget_weight, 'budget_weight')}

    def stats(self, model: nn.Module) -> Dict[str, torch.Tensor]:
        return self._share

    def _formula(
            self, network: nn.Module, input_size: Tuple[int, ...], masks: Mapping[str, torch.Tensor]) -> MacFormula:
        key = input_size, tuple(mask.shape[1] for mask in masks.values())  # (gates may be pruned)
        if key not in self._formulas:
            self._formulas[key] = mac_formula(network, input_size)
        return self._formulas[key]
