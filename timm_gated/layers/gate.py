"""Gates: modules that decide per image which parts of a network run

`Gate` is the base of all gates. A method defines how a gate scores its input, how it samples in training and how it
decides in evaluation. `ChannelGate` is the gate of the paper below: it reads a block's input and switches the filters
of the block.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The channel gate follows the paper: global average pool, FC to 16, BN, ReLU, FC to one logit per filter; a binary
concrete sample (hard forward, relaxed backward) in training, the sign of the logit in evaluation. The block does the
pooling, so that a bottleneck with two gates pools its input once. The paper leaves two points open: here the last bias
starts at the mean of the paper's prior, and a training batch of one image is normalised by the running statistics.
"""
from typing import Any, Callable, Dict, Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import register_notrace_module
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..utils import autocasts, check_number, full_precision, install

__all__ = [
    'apply_gate', 'binary_concrete', 'ChannelGate', 'Gate', 'GatePool', 'Gating', 'is_exporting', 'report_decision',
    'set_gate_noise', 'two_layers',
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
        noise: Scale of the noise; 0 gives the straight-through estimator.
    """
    logistic = torch.logit(torch.rand_like(logits), eps=torch.finfo(logits.dtype).eps)
    noisy = logits + noise * logistic
    soft = torch.sigmoid(noisy / temperature)
    # The bracket is exactly zero, so the forward values are exactly 0 or 1.
    return (noisy > 0).to(soft.dtype) + (soft - soft.detach())


def apply_gate(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Switch the channels of a feature map [N, C, H, W] by a mask [N, C], or all of them by a mask [N, 1]."""
    return x * mask.to(x.dtype)[:, :, None, None]


def two_layers(x: torch.Tensor, fc1: nn.Module, bn: nn.Module, fc2: nn.Module) -> torch.Tensor:
    """Logits of gates from features [N, C]: FC, BN, ReLU, FC."""
    x = fc1(x)
    if bn.training and x.shape[0] == 1 and isinstance(bn, nn.BatchNorm1d):
        # One image has no batch statistics. SyncBatchNorm has those of the other processes.
        x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=bn.eps)
    else:
        x = bn(x)
    return fc2(F.relu(x))


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether the model is being exported. Must not be traced: under torch 2.9 any compilation counts as an export."""
    return torch.compiler.is_exporting()


def report_decision(gate: 'Gate', mask: torch.Tensor) -> None:
    """Report a gate's decision to the `TorchFunctionMode`s of this thread, such as `MacCounter`."""
    if has_torch_function_unary(mask):
        handle_torch_function(report_decision, (mask,), gate, mask)


class Gating(nn.Module):
    """Base of the modules that a gated network adds to the dense one: gates, and modules that compute their inputs.

    All MACs inside count as overhead. A dense checkpoint has none of its keys and leaves it unchanged, as does
    mmengine's `init_cfg`: gating modules initialise themselves.
    """

    def apply(self, fn: Callable[[nn.Module], None]) -> 'Gating':
        # mmengine's `init_weights` sets this attribute on every module while it applies the initialisers of `init_cfg`,
        # which select layers by class, also inside gates.
        return self if hasattr(self, '_params_init_info') else super().apply(fn)

    def _load_from_state_dict(
            self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs) -> None:
        own = {prefix + name: value for name, value in self.state_dict().items()}
        present = [name for name in own if name in state_dict]
        if not present:
            state_dict.update(own)  # a dense checkpoint: keep the current values
        else:
            absent = [name for name in own if name not in state_dict and not name.endswith('num_batches_tracked')]
            if absent:
                error_msgs.append(
                    f'the gate {prefix[:-1]} is incomplete in the checkpoint: {", ".join(absent)} missing. '
                    f'A checkpoint must have all keys of a gate, or none (a dense checkpoint).')
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


@register_notrace_module
class GatePool(Gating, nn.AdaptiveAvgPool2d):
    """Global average pool of a feature map, [N, C], as the input of a gate."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if autocasts(x):
            # Pool in float32, which the gate casts to anyway. The gradient sums over all positions: in float16, times
            # the scale of a GradScaler, it would overflow and the step would be skipped.
            return x.mean((2, 3), dtype=torch.promote_types(x.dtype, torch.float32))
        return super().forward(x).flatten(1)


@register_notrace_module
class Gate(Gating):
    """Base of all gates.

    A subclass defines `num_gates`, `score` and `sample`, and may override `decide`, `weigh` and `logit_biases`.

    `logits` and `mask` of the last call stay on the module, each [N, num_gates], and are overwritten by the next call.
    Copies and pickles hold neither them nor `forced`.

    Attributes:
        logits: Scores that the gate decided by, with their graph, in float32 or float64.
        mask: The decision, with the gradient that trains the gate: 0 or 1, or in between if the gate is soft.
        forced: Mask that replaces the gate's own decision, see `force_gates`.
        log_odds: Whether `logits` are the log-odds of being open, as losses on probabilities require.
        num_ungated: Number of channels after the gated ones that have no gate and are always open. Pruning sets it.
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
        """Number of decisions per image: one per filter, or one per block."""
        raise NotImplementedError

    @property
    def decision(self) -> Optional[torch.Tensor]:
        """Detached binary mask: 1 where the gate was at least partly open."""
        return None if self.mask is None else (self.mask.detach() != 0).to(self.mask.dtype)

    @property
    def logit_biases(self) -> Dict[str, torch.Tensor]:
        """The bias that is added to the logits last, under the name '', see `timm_gated.layers.logit_biases`."""
        return {}

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, [N, num_gates], from the input of the gate."""
        raise NotImplementedError

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask in training."""
        raise NotImplementedError

    def decide(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask in evaluation."""
        return (logits > 0).to(logits.dtype)

    def weigh(self, mask: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Factors for the block from the mask, gates in the last dimension. A saliency may scale the open channels."""
        return mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Factors for the block, [N, num_gates + num_ungated] unless `weigh` adds dimensions."""
        with full_precision(x):
            logits = self.score(x.to(next(self.parameters(), x).dtype))
        return self.switch(logits)

    def switch(self, logits: torch.Tensor) -> torch.Tensor:
        """Decide by the logits and store both. Returns the same as `forward`."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.forced is not None:
            mask = self._forced_mask(logits)
        elif self.training:
            mask = self.sample(logits)
        else:
            mask = self.decide(logits)
        if not is_exporting():  # an exported graph has no state
            self.logits, self.mask = logits, mask
            report_decision(self, mask)
        weights = self.weigh(mask, logits)
        return F.pad(weights, (0, self.num_ungated), value=1.) if self.num_ungated else weights

    def _forced_mask(self, logits: torch.Tensor) -> torch.Tensor:
        assert self.forced is not None
        forced = self.forced.to(logits)
        if forced.ndim == 2 and forced.shape[0] not in (1, logits.shape[0]):
            raise ValueError(
                f'a gate is forced with masks for {forced.shape[0]} images, but the batch has {logits.shape[0]}.')
        return forced.expand_as(logits)

    def __getstate__(self) -> Dict[str, Any]:
        # Non-leaf tensors cannot be deep-copied.
        return {**self.__dict__, 'logits': None, 'mask': None, 'forced': None}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        install()


class ChannelGate(Gate):
    """One binary decision per filter, from the pooled input of a block, [N, in_channels].

    Args:
        in_channels: Channels of the block's input.
        num_gates: Number of filters to switch.
        hidden_channels: Width of the hidden layer.
        temperature: Temperature of the binary concrete relaxation.
        bias: Initial bias of the logits; 0.405 is the log-odds of the mean of a Beta(0.6, 0.4) prior. Use 2 to 3 to
            start from dense weights, so that most gates start open.

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
        # A tensor, so that a change does not recompile the network. It is a state of the training: not in checkpoints.
        self.register_buffer('noise', torch.tensor(1., device=device), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        self.noise.fill_(1.)

    @property
    def num_gates(self) -> int:
        return self.fc2.out_features

    @property
    def logit_biases(self) -> Dict[str, torch.Tensor]:
        return {'': self.fc2.bias}

    def extra_repr(self) -> str:
        return f'temperature={self.temperature:.3g}' + (f', num_ungated={self.num_ungated}' if self.num_ungated else '')

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return two_layers(x, self.fc1, self.bn, self.fc2)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        return binary_concrete(logits, self.temperature, self.noise)


def set_gate_noise(model: nn.Module, scale: float) -> None:
    """Scale the training noise of the gates of a model.

    Args:
        model: A model with gates. Only `ChannelGate` and its subclasses have noise.
        scale: Scale of the noise; 1 gives the binary concrete distribution, 0 no noise.
    """
    check_number(scale, 'scale of the noise', minimum=0)
    for module in model.modules():
        if isinstance(module, ChannelGate):
            module.noise.fill_(scale)

