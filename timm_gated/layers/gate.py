"""Gates: what decides, image by image, which parts of a network run

`Gate` is what all gates have in common, whatever they switch and however they decide; a method brings the few lines of
its own: how a gate scores its input, how it samples in training and how it decides in evaluation. `ChannelGate` is the
gate of the paper below: it reads a block's input and switches filters of the block.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The channel gate is the paper's: global average pool, FC to 16, BN, ReLU, FC to one logit a filter; a binary concrete
sample (hard forward, relaxed backward) in training, the sign of the logit in evaluation. The pooling is left to the
block, so that a bottleneck with two gates pools its input once. Where the paper is silent: the last bias starts at the
mean of the paper's prior, and a training batch of one image is normalised by the running statistics.
"""
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..utils import autocasts, check_number, full_precision, install, unwrap

__all__ = [
    'apply_gate', 'binary_concrete', 'ChannelGate', 'Gate', 'GatePool', 'gates', 'Gating', 'is_exporting',
    'report_decision', 'set_gate_noise', 'two_layers',
]


def binary_concrete(
        logits: torch.Tensor,
        temperature: float = 2 / 3,
        noise: Union[float, torch.Tensor] = 1.,
) -> torch.Tensor:
    """Sample binary gates: exactly 0 or 1 forward, the gradient of the binary concrete relaxation backward.

    Args:
        logits: Log-odds of each gate being open.
        temperature: Temperature of the relaxation.
        noise: Scale of the noise; without any, this is the plain straight-through estimator.
    """
    logistic = torch.logit(torch.rand_like(logits), eps=torch.finfo(logits.dtype).eps)
    noisy = logits + noise * logistic
    soft = torch.sigmoid(noisy / temperature)
    # The bracket is exactly zero, so that no rounding leaks into the 0s and 1s.
    return (noisy > 0).to(soft.dtype) + (soft - soft.detach())


def apply_gate(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Switch the channels of a feature map [N, C, H, W] by a mask [N, C], or the whole map by a mask [N, 1]."""
    return x * mask.to(x.dtype)[:, :, None, None]


def two_layers(x: torch.Tensor, fc1: nn.Module, bn: nn.Module, fc2: nn.Module) -> torch.Tensor:
    """Logits of gates from features [N, C]: FC, BN, ReLU, FC."""
    x = fc1(x)
    if bn.training and x.shape[0] == 1 and isinstance(bn, nn.BatchNorm1d):
        # One image has no batch statistics. (SyncBatchNorm, which sees the other processes, is left to itself.)
        x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps)
    else:
        x = bn(x)
    return fc2(F.relu(x))


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether this is an export. (A function to be called, not traced: torch 2.9 takes any compilation for one.)"""
    return torch.compiler.is_exporting()


def report_decision(gate: 'Gate', mask: torch.Tensor) -> None:
    """Tell what a gate decides to the `TorchFunctionMode`s of this thread, `MacCounter` for one; else do nothing."""
    if has_torch_function_unary(mask):
        handle_torch_function(report_decision, (mask,), gate, mask)


class Gating(nn.Module):
    """Base of what a gated network has and its plain network has not: gates, and what computes something for them.

    All MACs inside count as overhead, and a dense checkpoint, which has none of its keys, leaves it as it is. So does
    mmengine's `init_cfg`: gating initialises itself, by its own options.
    """

    def apply(self, fn: Callable[[nn.Module], None]) -> 'Gating':
        # Every module has this attribute while `init_weights` of an mmengine model applies the initialisers of its
        # `init_cfg`, which choose layers by their class, however deep inside a gate.
        return self if hasattr(self, '_params_init_info') else super().apply(fn)

    def _load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        own = {prefix + name: value for name, value in self.state_dict().items()}
        present = [name for name in own if name in state_dict]
        if not present:
            state_dict.update(own)  # a dense checkpoint: what is here stays
        else:
            absent = [name for name in own if name not in state_dict and not name.endswith('num_batches_tracked')]
            if absent:
                error_msgs.append(
                    f'the gate {prefix[:-1]} is only half in the checkpoint: {", ".join(absent)} missing. '
                    f'Either all keys of a gate are there, or none (a dense checkpoint).')
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


@register_notrace_module
class GatePool(Gating, nn.AdaptiveAvgPool2d):
    """Global average pool of a map, [N, C], for a gate to read."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if autocasts(x):
            # To float32, as a gate casts it anyway: its gradient, that of all positions together, is the largest of the
            # network. In float16, times the scale of a GradScaler, it would overflow and have the step skipped.
            return x.mean((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))
        return super().forward(x).flatten(1)


@register_notrace_module
class Gate(Gating):
    """Base of all gates.

    A subclass gives `num_gates`, `score` and `sample`, and if need be `decide` and `weigh`.

    The state of the last call stays on the module, each [N, num_gates], overwritten by the next call. It is left out of
    copies and pickles, as is forcing.

    Attributes:
        logits: What the decision was taken from, with its graph, in float32 or better.
        mask: What it came to, with the gradient that the gate trains by: 0 or 1, or between them if it is soft.
        forced: A mask instead of the gate's own, see `force_gates`.
        log_odds: Whether `logits` are the log-odds of being open. Losses on probabilities need it.
        num_ungated: Channels of the map, after the gated ones, that have no gate and are always open: what pruning
            leaves of gates that never closed.
    """

    log_odds: bool = True
    num_ungated: int = 0

    def __init__(self) -> None:
        super().__init__()
        install()
        self.forced: Optional[torch.Tensor] = None
        self.logits: Optional[torch.Tensor] = None
        self.mask: Optional[torch.Tensor] = None

    @property
    def num_gates(self) -> int:
        """Number of decisions for an image: one a filter, or one for a whole block."""
        raise NotImplementedError

    @property
    def decision(self) -> Optional[torch.Tensor]:
        """From the mask: 1 where something had to be computed, and 0 where it was skipped. Detached."""
        return None if self.mask is None else (self.mask.detach() != 0).to(self.mask.dtype)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, num_gates] from what the block hands to its gate."""
        raise NotImplementedError

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask in training."""
        raise NotImplementedError

    def decide(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask in evaluation."""
        return (logits > 0).to(logits.dtype)

    def weigh(self, mask: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """What the block gets, from the mask, gates in the last dimension: a saliency may scale what is open."""
        return mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Decide; returns what the block multiplies by, [N, num_gates + num_ungated] unless `weigh` says more."""
        with full_precision(x):
            logits = self.score(x.to(next(self.parameters(), x).dtype))
        return self.switch(logits)

    def switch(self, logits: torch.Tensor) -> torch.Tensor:
        """Decide by the scores, and keep both; returns what `forward` does."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.forced is not None:
            mask = self._forced_mask(logits)
        elif self.training:
            mask = self.sample(logits)
        else:
            mask = self.decide(logits)
        if not is_exporting():  # an exported graph has no modules to keep state on
            self.logits, self.mask = logits, mask
            report_decision(self, mask)
        weights = self.weigh(mask, logits)
        return F.pad(weights, (0, self.num_ungated), value=1.) if self.num_ungated else weights

    def _forced_mask(self, logits: torch.Tensor) -> torch.Tensor:
        assert self.forced is not None
        forced = self.forced.to(logits)
        if forced.ndim == 2 and forced.shape[0] not in (1, logits.shape[0]):
            raise ValueError(
                f'a gate is forced by masks for {forced.shape[0]} images, but the batch has {logits.shape[0]}.')
        return forced.expand_as(logits)

    def __getstate__(self) -> Dict[str, Any]:
        # A non-leaf tensor cannot be deep-copied; and neither the last batch nor a context is a property of the model.
        return {**self.__dict__, 'logits': None, 'mask': None, 'forced': None}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        install()


class ChannelGate(Gate):
    """One binary decision a filter, from the pooled input of a block, [N, in_channels].

    Args:
        in_channels: Channels of the block's input.
        num_gates: Filters to switch.
        hidden_channels: Width of the hidden layer.
        temperature: Temperature of the binary concrete relaxation.
        bias: Initial bias of the logits; 0.405 is the log-odds of the mean of a Beta(0.6, 0.4) prior. Dense
            weights that are gated afterwards want gates that start open: about 2 to 3.

    Attributes:
        noise: Scale of the noise in training.
    """

    noise: torch.Tensor

    def __init__(
            self,
            in_channels: int,
            num_gates: int,
            hidden_channels: int = 16,
            temperature: float = 2 / 3,
            bias: float = 0.405,
            device=None,
            dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        check_number(hidden_channels, 'hidden_channels of a gate', minimum=1, integer=True)
        check_number(bias, 'bias of a gate')
        self.temperature = check_number(temperature, 'temperature of a gate', above=0)
        self.fc1 = nn.Linear(in_channels, hidden_channels, **dd)
        self.bn = nn.BatchNorm1d(hidden_channels, **dd)
        self.fc2 = nn.Linear(hidden_channels, num_gates, **dd)
        nn.init.constant_(self.fc2.bias, bias)
        # A tensor, so that a compiled network follows; not part of a checkpoint, as it is the training's.
        self.register_buffer('noise', torch.tensor(1., device=device), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        self.noise.fill_(1.)

    @property
    def num_gates(self) -> int:
        return self.fc2.out_features

    def extra_repr(self) -> str:
        return f'temperature={self.temperature:.3g}' + (f', num_ungated={self.num_ungated}' if self.num_ungated else '')

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return two_layers(x, self.fc1, self.bn, self.fc2)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        return binary_concrete(logits, self.temperature, self.noise)


def gates(model: nn.Module) -> List[Tuple[str, Gate]]:
    """All gates of a model as (name, gate) pairs, in the order of its modules.

    Names are those of the model itself, also if it is wrapped by DDP or `torch.compile`.
    """
    return [(name, module) for name, module in unwrap(model).named_modules() if isinstance(module, Gate)]


def set_gate_noise(model: nn.Module, scale: float) -> None:
    """Scale the noise that the gates of a model decide with in training.

    Args:
        model: A model with gates. Only `ChannelGate` and its subclasses have noise to scale.
        scale: 1 for the binary concrete distribution, 0 for none.
    """
    check_number(scale, 'scale of the noise', minimum=0)
    for _, gate in gates(model):
        if isinstance(gate, ChannelGate):
            gate.noise.fill_(scale)


