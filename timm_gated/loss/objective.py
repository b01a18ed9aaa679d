"""Objectives: loss terms that a model adds to its task loss

An objective is a child module of the network. It stays with the network under DDP, `torch.compile`, EMA and
distillation wrappers, and the model's optimizer trains the parameters of its priors. The training task
(`timm_gated.task`) finds it by walking the modules. The forward pass of the network does not use it.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn as nn

from ..layers import Gate, LastPass, set_gate_noise
from ..utils import check_number, gather_batch, install, unwrap
from .gate_losses import batch_shaping_loss, check_reduction, l0_loss
from .priors import Mixture, Prior, create_prior
from .schedules import Epochs, Scheduled, check_epochs, linear_anneal, linear_warmup
from .snapshots import GateSnapshots

__all__ = ['GateLosses', 'Objective', 'find_objectives', 'objectives', 'Step', 'Term']

PriorSpec = Union[Prior, str, Mapping[str, Any]]


class Term(NamedTuple):
    """A loss term, which adds weight * value to the training loss."""
    value: torch.Tensor
    weight: float
    weight_name: str


class Step(NamedTuple):
    """Input, output and target of a training step."""
    input: torch.Tensor
    output: torch.Tensor
    target: torch.Tensor


class Objective(nn.Module):
    """Base of the objectives: loss terms as a function of a network's last forward pass and the epoch.

    The methods that take a `model` accept a module or the `LastPass` of a module. The task passes the `LastPass` of the
    module whose child the objective is, except to `begin_epoch`.

    Attributes:
        epoch_begins: Whether `train()` was called since the task last began an epoch.
        log_interval: Number of training steps between two log lines.
        gather_gates: Whether training losses and logged values use the batches of all processes. Set by the model
            option of the same name.
    """

    epoch_begins: bool = True
    log_interval: int = 50
    gather_gates: bool = False

    def __init__(self) -> None:
        super().__init__()
        install()

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        install()

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of all processes if `gather_gates` is set and the objective is in training mode; else `x`."""
        return gather_batch(x) if self.gather_gates and self.training else x

    def train(self, mode: bool = True) -> 'Objective':
        self.epoch_begins = self.epoch_begins or mode
        if not mode:
            self.flush()
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Identity, for containers that run all of their children."""
        return x

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        # Learnable priors matter in training only, so a checkpoint may lack them or hold others.
        own = {prefix + name: value for name, value in self.state_dict().items()}
        for key in [key for key in state_dict if key.startswith(prefix) and key not in own]:
            del state_dict[key]
        for key, value in own.items():
            state_dict.setdefault(key, value)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def attach(self, network: nn.Module) -> None:
        """Prepare for the network whose child this is. Called once, when the network is built."""

    def terms(self, model: Any, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        """Loss terms of the last forward pass, by name.

        Args:
            model: The network, or its `LastPass`.
            epoch: The current epoch.
            step: The training step of that pass, for terms that depend on images or labels. Tasks always pass it.
        """
        raise NotImplementedError

    def schedule(self) -> List[Scheduled]:
        """Scheduled values, for the log."""
        return []

    def stats(self, model: Any) -> Dict[str, torch.Tensor]:
        """Additional values to log. The task itself logs the gate density."""
        return {}

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Apply schedules of the network itself, such as that of the gate noise.

        The task calls this before the first forward pass of an epoch and when a training is resumed, for the trained
        model and for its average (EMA).
        """

    def observe(self, model: Any, epoch: int) -> None:
        """Record the forward pass of a training step. Called by the task."""

    def flush(self) -> None:
        """Write the records. Called when the model switches to evaluation mode, and for every checkpoint."""


def objectives(model: nn.Module) -> List[Objective]:
    """All objectives of a model."""
    return [module for module in model.modules() if isinstance(module, Objective)]


def find_objectives(model: nn.Module) -> Tuple[LastPass, List[Tuple[Objective, LastPass]]]:
    """Last pass of a model, and its objectives with the last passes of their parent modules, found in one walk."""
    modules = dict(unwrap(model).named_modules())
    named_gates = [(name, module) for name, module in modules.items() if isinstance(module, Gate)]
    passes = {'': LastPass(model, named_gates)}
    found = []
    for name, module in modules.items():
        if isinstance(module, Objective):
            parent = name.rpartition('.')[0]
            if parent not in passes:
                inside = [(n[len(parent) + 1:], gate) for n, gate in named_gates if n.startswith(f'{parent}.')]
                passes[parent] = LastPass(modules[parent], inside)
            found.append((module, passes[parent]))
    return passes[''], found


class GateLosses(Objective):
    """The paper's objective: batch shaping and L0 over all gates of a network.

    Args:
        lam: Weight of the batch-shaping loss (the paper's lambda).
        lam_epochs: Epochs over which `lam` is annealed linearly to zero, or 'fixed'.
        gamma: Weight of the L0 loss.
        gamma_epochs: Epochs over which `gamma` is ramped up linearly from zero, or 'fixed'.
        prior: Prior of each gate's sigmoid(logit) over the batch: an object, a name, or a dict with its `type`.
        prior_end: Optional prior that gradually replaces `prior`, as a mixture of the two.
        prior_epochs: Epochs over which `prior_end` replaces `prior`, linearly.
        lam_reduction: 'sum' over the gates (the paper's text) or 'mean' (its authors' loss release).
        gamma_reduction: 'mean' over the gates, or 'sum' (the paper's formula).
        noise_epochs: Epochs over which the training noise of the gates is annealed linearly to zero, or 'fixed' (the
            paper).
        log_interval: Number of training steps between two log lines.
        snapshot_dir: Folder for gate distributions, written once per epoch (see `timm_gated.loss.snapshots`).
        snapshot_gates: Number of gates in the snapshots.
    """

    def __init__(
            self,
            lam: float = 0.75,
            lam_epochs: Epochs = 'fixed',
            gamma: float = 0.05,
            gamma_epochs: Epochs = 'fixed',
            prior: PriorSpec = 'beta',
            prior_end: Optional[PriorSpec] = None,
            prior_epochs: Optional[Tuple[float, float]] = None,
            lam_reduction: str = 'sum',
            gamma_reduction: str = 'mean',
            noise_epochs: Epochs = 'fixed',
            log_interval: int = 50,
            snapshot_dir: Optional[str] = None,
            snapshot_gates: int = 64,
    ) -> None:
        super().__init__()
        self.lam = check_number(lam, 'lam', minimum=0)
        self.gamma = check_number(gamma, 'gamma', minimum=0)
        self.lam_epochs = check_epochs(lam_epochs, 'lam_epochs')
        self.gamma_epochs = check_epochs(gamma_epochs, 'gamma_epochs')
        if (prior_end is None) != (prior_epochs is None):
            raise ValueError(
                f'prior_end and prior_epochs must be given together, got {prior_end!r} and {prior_epochs!r}.')
        self.prior = create_prior(prior) if prior_end is None else Mixture(prior, prior_end, share=1.)
        self.prior_epochs = None if prior_epochs is None else check_epochs(prior_epochs, 'prior_epochs')
        self.lam_reduction = check_reduction(lam_reduction, ('sum', 'mean'))
        self.gamma_reduction = check_reduction(gamma_reduction, ('sum', 'mean'))
        self.noise_epochs = check_epochs(noise_epochs, 'noise_epochs')
        self.log_interval = check_number(log_interval, 'log_interval', minimum=1, integer=True)
        self.snapshots = None if snapshot_dir is None else GateSnapshots(snapshot_dir, snapshot_gates)

    def extra_repr(self) -> str:
        return (
            f'lam={self.lam}, lam_epochs={self.lam_epochs}, lam_reduction={self.lam_reduction}, '
            f'gamma={self.gamma}, gamma_epochs={self.gamma_epochs}, gamma_reduction={self.gamma_reduction}')

    def schedule(self) -> List[Scheduled]:
        scheduled = [
            Scheduled('batch_shaping_loss', 'lam', self.lam, self.weights(math.inf)[0], self.lam_epochs),
            Scheduled('l0_loss', 'gamma', 0., self.gamma, self.gamma_epochs),
        ]
        if self.prior_epochs is not None:
            scheduled.append(Scheduled('prior_end', 'share', 0., 1., self.prior_epochs))
        if self.noise_epochs != 'fixed':
            scheduled.append(Scheduled('gates', 'noise', 1., 0., self.noise_epochs))
        return scheduled

    def weights(self, epoch: float) -> Tuple[float, float]:
        """lambda and gamma at an epoch."""
        lam, gamma = self.lam, self.gamma
        if self.lam_epochs != 'fixed':
            lam = linear_anneal(epoch, lam, *self.lam_epochs)
        if self.gamma_epochs != 'fixed':
            gamma = linear_warmup(epoch, gamma, *self.gamma_epochs)
        return lam, gamma

    def terms(self, model: Any, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        lam, gamma = self.weights(epoch)
        logits = self.gathered(LastPass.of(model).logits())
        if isinstance(self.prior, Mixture) and self.prior_epochs is not None:
            self.prior.share = linear_warmup(epoch, 1., *self.prior_epochs)
        if lam or any(p.requires_grad for p in self.prior.parameters()):
            # A learnable prior stays in the graph, since DDP waits for the gradient of every parameter.
            shaping = batch_shaping_loss(torch.sigmoid(logits), self.prior, self.lam_reduction)
        else:
            shaping = logits.new_zeros(())
        return {
            'batch_shaping_loss': Term(shaping, lam, 'lam'),
            'l0_loss': Term(l0_loss(logits, self.gamma_reduction), gamma, 'gamma'),
        }

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        if self.noise_epochs != 'fixed':
            set_gate_noise(model, linear_anneal(epoch, 1., *self.noise_epochs))

    def observe(self, model: Any, epoch: int) -> None:
        if self.snapshots is not None:
            lam, gamma = self.weights(epoch)
            self.snapshots.update(model, epoch, lam=lam, gamma=gamma)

    def flush(self) -> None:
        if self.snapshots is not None:
            self.snapshots.write()

