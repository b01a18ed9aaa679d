"""Networks for the tests: with the values of a fresh initialisation many mistakes would not show."""
import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm

from timm_gated import gates


@torch.no_grad()
def shuffle(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give norms random affine parameters and statistics, and gates logits of both signs. In place."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    for module in model.modules():
        if isinstance(module, _BatchNorm):
            uniform(module.weight, 0.5, 1.)
            uniform(module.bias, -0.3, 0.3)
            uniform(module.running_mean, -0.3, 0.3)
            uniform(module.running_var, 0.5, 1.5)
    for _, gate in gates(model):
        uniform(gate.fc1.weight, -1., 1.)
        uniform(gate.fc2.weight, -1., 1.)
        uniform(gate.fc2.bias, -1., 1.)
    return model


def gate_loss(model: nn.Module) -> torch.Tensor:
    """A loss on the logits that the gates keep."""
    return sum(torch.sigmoid(gate.logits).mean() for _, gate in gates(model))
