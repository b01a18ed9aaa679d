"""Recurrent and feed-forward gates of SkipNet

Each gate reads the input of the block that it switches.

Paper: SkipNet: Learning Dynamic Routing in Convolutional Networks (https://arxiv.org/abs/1711.09485)

Differences from the original: pooling adapts to any image size. The max pooling of feed-forward gates keeps the last
row and column of odd maps, so that single pixels can be pooled. A softmax over two outputs is computed as the sigmoid
of their difference, so that every gate has log-odds.
"""
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Type

import torch
import torch.nn as nn

from ..utils import check_number, full_precision
from .gate import Gate, GatePool

__all__ = ['GATES', 'STAGES', 'FeedForwardGate1', 'FeedForwardGate2', 'Memory', 'RecurrentGate', 'SkipGate']

STAGES = ('supervised', 'soft', 'hybrid')


class SkipGate(Gate):
    """Base of SkipNet's gates, which read the feature map itself and are trained in stages.

    Attributes:
        stage: Kind of mask in training, set by `Skipping`: 'supervised' is the decision of evaluation with the gradient
            of the probability, 'soft' is the probability, 'hybrid' is a sample without gradient.
    """

    stage: str = 'supervised'

    def follow(self) -> None:
        """Delete the layers that this gate shares with the first gate of the network."""

    def recall(self, x: torch.Tensor, memory: Optional['Memory']) -> Tuple[torch.Tensor, Optional['Memory']]:
        """Mask, and memory for the next gate, from the feature map and the memory of the previous gates."""
        return self(x), memory

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        probability = torch.sigmoid(logits)
        if self.stage == 'hybrid':
            return torch.bernoulli(probability.detach())
        if self.stage == 'soft':
            return probability
        return self.decide(logits) + (probability - probability.detach())


class Memory(NamedTuple):
    """Memory that recurrent gates pass on.

    Attributes:
        lstm: LSTM shared by all gates.
        fc: Output layer shared by all gates.
        state: State of the LSTM after the last gate.
    """
    lstm: nn.LSTMCell
    fc: nn.Linear
    state: Optional[Tuple[torch.Tensor, torch.Tensor]] = None


class RecurrentGate(SkipGate):
    """One decision per block, by an LSTM over the inputs of all previous blocks.

    Each gate has its own pooling and projection. The LSTM and the output layer belong to the first gate of the network
    and reach the others through the memory.

    Args:
        in_channels: Channels of the block's input.
        num_gates: Number of blocks to switch.
        hidden_channels: Width of projection and LSTM.
        bias: Initial bias of the logits; by default about 88 % of the blocks run at first, so that all get trained.
    """

    def __init__(
            self,
            in_channels: int,
            num_gates: int,
            hidden_channels: int = 10,
            bias: float = 2.,
            device=None,
            dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        check_number(hidden_channels, 'hidden_channels of a gate', minimum=1, integer=True)
        self._num_gates = num_gates
        self.pool = GatePool()
        self.proj = nn.Linear(in_channels, hidden_channels, **dd)
        self.lstm = nn.LSTMCell(hidden_channels, hidden_channels, **dd)
        self.fc = nn.Linear(hidden_channels, num_gates, **dd)
        for weight in (self.lstm.weight_ih, self.lstm.weight_hh, self.fc.weight):
            nn.init.xavier_normal_(weight)
        for zeros in (self.lstm.bias_ih, self.lstm.bias_hh):
            nn.init.zeros_(zeros)
        nn.init.constant_(self.fc.bias, check_number(bias, 'bias of a gate'))

    @property
    def num_gates(self) -> int:
        return self._num_gates

    def follow(self) -> None:
        del self.lstm, self.fc

    def recall(self, x: torch.Tensor, memory: Optional[Memory]) -> Tuple[torch.Tensor, Optional[Memory]]:
        return self(x, memory)

    def forward(  # type: ignore[override]
            self, x: torch.Tensor, memory: Optional[Memory] = None) -> Tuple[torch.Tensor, Memory]:
        if memory is None:
            if not hasattr(self, 'lstm'):
                raise RuntimeError(
                    'this gate was told nothing of the gates before it, whose LSTM it shares. Run the complete '
                    'network.')
            memory = Memory(self.lstm, self.fc)
        with full_precision(x):
            pooled = self.pool(x.to(self.proj.weight.dtype))
            state = memory.lstm(self.proj(pooled), memory.state)
            logits = memory.fc(state[0])
        return self.switch(logits), Memory(memory.lstm, memory.fc, state)


class _FeedForwardGate(SkipGate):
    """One decision per block, by convolutions as wide as its input. With bottlenecks they cost more than the blocks.

    Args:
        in_channels: Channels of the block's input.
        num_gates: Number of blocks to switch.
        bias: Initial bias of the open output; that of the closed output is zero. By default about 88 % of the blocks
            run at first.
    """

    def __init__(
            self,
            in_channels: int,
            num_gates: int,
            bias: float = 2.,
            device=None,
            dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        self.body = nn.Sequential(*self._layers(in_channels, dd), GatePool())
        self.fc = nn.Linear(in_channels, 2 * num_gates, **dd)  # closed and open
        nn.init.zeros_(self.fc.bias)
        nn.init.constant_(self.fc.bias[1::2], check_number(bias, 'bias of a gate'))

    def _layers(self, channels: int, dd: Dict[str, Any]) -> List[nn.Module]:
        raise NotImplementedError

    @property
    def num_gates(self) -> int:
        return self.fc.out_features // 2

    @property
    def logit_biases(self) -> Dict[str, torch.Tensor]:
        return {'': self.fc.bias[1::2]}  # of the open outcome

    def score(self, x: torch.Tensor) -> torch.Tensor:
        outcomes = self.fc(self.body(x)).unflatten(1, (-1, 2))
        return outcomes[..., 1] - outcomes[..., 0]


def _conv3x3(channels: int, stride: int, dd: Dict[str, Any]) -> List[nn.Module]:
    conv = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False, **dd)
    return [conv, nn.BatchNorm2d(channels, **dd), nn.ReLU(inplace=True)]


class FeedForwardGate1(_FeedForwardGate):
    """Feed-forward gate I: max pool, two 3x3 convolutions, the second with stride 2, average pool, softmax over 2."""

    def _layers(self, channels: int, dd: Dict[str, Any]) -> List[nn.Module]:
        return [nn.MaxPool2d(2, ceil_mode=True), *_conv3x3(channels, 1, dd), *_conv3x3(channels, 2, dd)]


class FeedForwardGate2(_FeedForwardGate):
    """Feed-forward gate II: one 3x3 convolution with stride 2, average pool, softmax over 2."""

    def _layers(self, channels: int, dd: Dict[str, Any]) -> List[nn.Module]:
        return _conv3x3(channels, 2, dd)


GATES: Dict[str, Type[SkipGate]] = {'rnn': RecurrentGate, 'ff1': FeedForwardGate1, 'ff2': FeedForwardGate2}
