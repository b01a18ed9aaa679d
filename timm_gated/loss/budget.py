"""A MAC budget as a loss

The user sets a share of the dense network's MACs, such as one half, instead of tuning the weight of a sparsity loss.
The loss is lambda * (F / F0 - t)^2, with F the mean MACs of a training batch, F0 those of the dense network and t the
budget.

Paper: Dynamic Dual Gating Neural Networks (DGNet, https://openaccess.thecvf.com/content/ICCV2021/html/
    Li_Dynamic_Dual_Gating_Neural_Networks_ICCV_2021_paper.html)

F is the count of `count_macs` for the decisions of the batch, gate overhead included; gradients flow through the masks.
Gates decide with noise in training and without in evaluation, so the MACs of the two may differ.
"""
from typing import Any, Dict, Optional

import torch

from ..layers import LastPass, MacFormulas
from ..utils import check_number
from .objective import Objective, Step, Term

__all__ = ['budget_loss', 'MacBudget']


def budget_loss(used: torch.Tensor, dense: int, budget: float) -> torch.Tensor:
    """Squared difference between the share of MACs that a batch used and a budget.

    Args:
        used: MACs of each sample, [N].
        dense: MACs per sample in the dense network.
        budget: Target share of the dense MACs.
    """
    return (used.mean() / dense - budget) ** 2


class MacBudget(Objective):
    """Drives the mean MACs of a network's training batches to a share of the dense network's.

    Args:
        budget: Target share, above 0 and at most 1.
        budget_weight: Weight of the loss (lambda).
    """

    def __init__(self, budget: float = 0.5, budget_weight: float = 10.) -> None:
        super().__init__()
        self.budget = check_number(budget, 'budget', above=0, maximum=1)
        self.budget_weight = check_number(budget_weight, 'budget_weight', minimum=0)
        self._formulas = MacFormulas()
        self._share: Dict[str, torch.Tensor] = {}

    def extra_repr(self) -> str:
        return f'budget={self.budget}, budget_weight={self.budget_weight}'

    def terms(self, model: Any, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        if step is None:
            raise ValueError('MACs depend on the size of the images: MacBudget needs the step, got None.')
        last = LastPass.of(model)
        masks = last.masks()
        formula = self._formulas.find(last.network, tuple(step.input.shape[1:]), masks)
        used = self.gathered(formula.used(masks))
        self._share = {'macs_share': used.detach().mean() / formula.dense}
        return {'budget_loss': Term(budget_loss(used, formula.dense, self.budget), self.budget_weight, 'budget_weight')}

    def stats(self, model: Any) -> Dict[str, torch.Tensor]:
        return self._share
