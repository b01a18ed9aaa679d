"""What a model is trained with beside its task loss

An objective is a module inside the model. It travels with the model through DDP, `torch.compile`, EMA and
distillation wrappers, its priors may have parameters that the model's optimizer trains, and the training task
(`timm_gated.task`) finds it by walking the modules. In the model's forward it does nothing.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
import math
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn as nn

from ..layers import gate_logits, set_gate_noise
from ..utils import check_number, gather_batch, install
from .gate_losses import batch_shaping_loss, check_reduction, l0_loss
from .priors import Mixture, Prior, create_prior
from .schedules import Epochs, Scheduled, check_epochs, linear_anneal, linear_warmup
from .snapshots import GateSnapshots

__all__ = ['GateLosses', 'Objective', 'objectives', 'Step', 'Term']

PriorSpec = Union[Prior, str, Mapping[str, Any]]


class Term(NamedTuple):
    """One loss term: it adds weight * value to the training loss."""
    value: torch.Tensor
    weight: float
    weight_name: str


class Step(NamedTuple):
    """A training step: what went in, what came out, and what should have."""
    input: torch.Tensor
    output: torch.Tensor
    target: torch.Tensor


class Objective(nn.Module):
    """Base of the objectives: loss terms as a function of a model's last forward pass and the epoch.

    Attributes:
        gather_gates: Losses, and what is logged of the gates, are in training those of the batch of all processes,
            instead of each process's own. The model option of that name sets it.
    """

    # Set by every call of train(), as training loops make one at the start of an epoch; cleared by the task.
    epoch_begins: bool = True
    log_interval: int = 50  # training steps between two lines of the log
    gather_gates: bool = False

    def __init__(self) -> None:
        super().__init__()
        install()

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        install()

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """What the samples of a batch have, [N, …], as `gather_gates` says."""
        return gather_batch(x) if self.gather_gates and self.training else x

    def train(self, mode: bool = True) -> 'Objective':
        self.epoch_begins = self.epoch_begins or mode
        if not mode:
            self.flush()
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The identity, for containers that run all of their children."""
        return x

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        # Priors that learn concern training alone: a checkpoint without them, or with others, is no worse for it.
        own = {prefix + name: value for name, value in self.state_dict().items()}
        for key in [key for key in state_dict if key.startswith(prefix) and key not in own]:
            del state_dict[key]
        for key, value in own.items():
            state_dict.setdefault(key, value)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def attach(self, network: nn.Module) -> None:
        """Get to know the network whose child this is, once it is built."""

    def terms(self, model: nn.Module, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        """Loss terms of the last forward pass of `model`, by name.

        Args:
            model: The network, or whatever the task trains that contains it.
            epoch: The current epoch.
            step: Of which that pass was part, for what depends on the images or on their labels. Tasks give it.
        """
        raise NotImplementedError

    def schedule(self) -> List[Scheduled]:
        """What changes over a training, for the log."""
        return []

    def stats(self, model: nn.Module) -> Dict[str, torch.Tensor]:
        """What else is worth a place in the log. (The density of the gates is there already.)"""
        return {}

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        """Make the network ready for an epoch of training, as far as its schedule goes beyond loss terms.

        Called by the task before the epoch's first forward pass, when a training is resumed, and for the average (EMA)
        of the network as well.
        """

    def observe(self, model: nn.Module, epoch: int) -> None:
        """Take note of a training step's forward pass. Called by the task."""

    def flush(self) -> None:
        """Write what was noted so far. Called when the model goes into evaluation, and for every checkpoint."""


def objectives(model: nn.Module) -> List[Objective]:
    """All objectives of a model."""
    return [module for module in model.modules() if isinstance(module, Objective)]


class GateLosses(Objective):
    """Batch shaping and L0 over all gates of a model: the paper's objective.

    Args:
        lam: Weight of the batch-shaping loss (the paper's lambda).
        lam_epochs: Epochs over which `lam` is annealed linearly to zero, or 'fixed'.
        gamma: Weight of the L0 loss.
        gamma_epochs: Epochs over which `gamma` is ramped up linearly from zero, or 'fixed'.
        prior: Prior of each gate's sigmoid(logit) over the batch: an object, a name, or a dict with its `type`.
        prior_end: Another prior, a sparser one, say, that takes its place step by step: a mixture of the two.
        prior_epochs: Epochs over which it does, linearly.
        lam_reduction: 'sum' over the gates (the paper's text) or 'mean' (its authors' loss release).
        gamma_reduction: 'mean' over the gates, or 'sum' (the paper's formula).
        noise_epochs: Epochs over which the noise that gates decide with in training is annealed linearly to none, or
            'fixed' (the paper).
        log_interval: Training steps between two lines of the log.
        snapshot_dir: Folder that gets the distribution of some gates, once an epoch (see `timm_gated.loss.snapshots`).
        snapshot_gates: Number of those gates.
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
                f'prior_end and prior_epochs belong together, got {prior_end!r} and {prior_epochs!r}.')
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

    def terms(self, model: nn.Module, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        lam, gamma = self.weights(epoch)
        logits = self.gathered(gate_logits(model))
        if isinstance(self.prior, Mixture) and self.prior_epochs is not None:
            self.prior.share = linear_warmup(epoch, 1., *self.prior_epochs)
        if lam or any(p.requires_grad for p in self.prior.parameters()):
            # (A prior that learns is kept in the graph: DDP waits for the gradient of every parameter.)
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

    def observe(self, model: nn.Module, epoch: int) -> None:
        if self.snapshots is not None:
            lam, gamma = self.weights(epoch)
            self.snapshots.update(model, epoch, lam=lam, gamma=gamma)

    def flush(self) -> None:
        if self.snapshots is not None:
            self.snapshots.write()


