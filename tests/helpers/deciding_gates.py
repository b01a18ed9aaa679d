"""Gates with given decisions, for tests of programs"""
import torch

from timm_gated.inference.program import GateOp

__all__ = ['constant_gate', 'deciding_gate', 'numbered_images']


def constant_gate(gate: int, channels: int, mask: torch.Tensor) -> GateOp:
    """A gate on map 0 with the same decision for all images."""
    return GateOp(0, gate, torch.zeros(4, channels), torch.zeros(4), torch.zeros(len(mask), 4), mask.float() - 0.5)


def deciding_gate(gate: int, channels: int, masks: torch.Tensor) -> GateOp:
    """A gate on map 0 with one decision per image. The mean of the first channel is the index of the image."""
    number = torch.arange(len(masks), dtype=torch.float64)
    weight1 = torch.zeros(len(masks), channels)
    weight1[:, 0] = 1
    hidden = (number[:, None] - number + 0.5).relu()  # invertible
    weight2 = torch.linalg.solve(hidden, masks.double() - 0.5).T
    return GateOp(0, gate, weight1, 0.5 - number.float(), weight2.float(), torch.zeros(masks.shape[1]))


def numbered_images(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    x[:, 0] += (torch.arange(len(x)) - x[:, 0].mean((1, 2)))[:, None, None]
    return x
