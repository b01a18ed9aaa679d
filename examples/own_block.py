"""Gate a residual block of your own, and train, count, report, prune and accelerate a network of such blocks

    python examples/own_block.py

`Block` is the dense block, `GatedBlock` adds a gate to it. The network is trained on scikit-learn's digits to half of
its MACs. docs/tutorials/gate_your_resnet.md explains each step.

The protocol has three parts. A block computes a mask and applies it; its property `gated_convs` names the convolutions
that the mask switches, each with the gates over its inputs and its outputs. A gate is a `ChannelGate` or a subclass of
`Gate`. An objective, a child of the network, adds its losses to those of timm's training tasks.

`accelerate` also needs to know what runs in which order: `register_forward` declares that a block computes what timm's
blocks compute, and `trunk` lists the parts of the network.
"""
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from timm.layers import SelectAdaptivePool2d
from timm.task import ClassificationTask
from torch.utils.data import DataLoader, TensorDataset

from timm_gated import ChannelGate, GatePool, GateStatistics, MacBudget, accelerate, count_macs, prune_static
from timm_gated.inference import Trunk, first_map, register_forward, trunk
from timm_gated.layers import decide, switch

__all__ = ['Block', 'GatedBlock', 'Network', 'main']


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 5, padding=2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None  # the shortcut is the input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(inner)))


class GatedBlock(Block):
    """`Block` with a gate over its inner map. The weights of a `Block` load into it.

    `prune_static` finds the layers of map 1 by their names: conv1, bn1, gate1, and conv2, which reads the map. It sets
    gates that it removes to None; `decide` and `switch` skip those.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, width)
        self.gate_pool = GatePool()
        self.gate1 = ChannelGate(channels, width, bias=2.)

    @property
    def gated_convs(self) -> dict:
        return {'conv1': (None, self.gate1), 'conv2': (self.gate1, None)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masks = decide(self, [1], x)
        inner = switch(torch.relu(self.bn1(self.conv1(x))), masks, 1)
        return torch.relu(x + self.bn2(self.conv2(inner)))


class Network(nn.Module):
    """Three blocks between a stem and a head.

    Args:
        block: Class of the blocks.
        budget: Target share of the MACs, for a network of gated blocks.
    """

    def __init__(self, block: type = GatedBlock, budget: float = 0.5) -> None:
        super().__init__()
        self.num_classes = 10
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(block(16, 32) for _ in range(3)))
        self.head = nn.Sequential(SelectAdaptivePool2d(flatten=True), nn.Linear(16, self.num_classes))
        if block is GatedBlock:
            self.mac_budget = MacBudget(budget)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)))


for cls in (Block, GatedBlock, Network):
    register_forward(cls)


@trunk.register
def _(model: Network) -> Trunk:
    return Trunk([(model.stem, False), (model.blocks, True)], first_map, model.head)


def digits(count: int) -> DataLoader:
    """Batches of scikit-learn's digits."""
    data = load_digits()
    x = torch.tensor(data.images[:count] / 8 - 1).float()[:, None]
    return DataLoader(TensorDataset(x, torch.tensor(data.target[:count])), batch_size=64, shuffle=True)


def main(epochs: int = 4, count: int = 1797) -> None:
    torch.manual_seed(0)
    loader = digits(count)
    model = Network()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        for x, y in loader:
            result = task(x, y)
            optimizer.zero_grad()
            result['loss'].backward()
            optimizer.step()
        print(f'epoch {epoch}: loss {result["task_loss"]:.3f}, share of MACs {result["macs_share"]:.3f}')

    model.eval()
    statistics = GateStatistics()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
            statistics.update(model)
    macs = count_macs(model, x)
    print(f'{macs.dense / 1e6:.2f} M MACs, {macs.share:.1%} used; gates: {statistics.counts()}')
    pruned = prune_static(model, loader)
    print(pruned)
    fast = accelerate(pruned.model)
    with torch.no_grad():
        print(f'accelerated by {fast.backend}: difference {(fast(x) - pruned.model(x)).abs().max():.1e}')


if __name__ == '__main__':
    main()
