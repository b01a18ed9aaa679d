"""The gates of a model and their decisions in its last forward pass"""
from typing import Dict, List, Optional, Tuple, Union

import torch
import torch.nn as nn

from ..utils import average_batches, unwrap
from .gate import Gate

__all__ = ['LastPass', 'gate_density', 'gate_logits', 'gate_masks', 'gate_scores', 'gates', 'logit_biases']


class LastPass:
    """Decisions of the gates of a network in its last forward pass.

    The network is walked once, on construction. The values are read from the gates on demand.

    Args:
        network: A module with gates; DDP and `torch.compile` wrappers are removed.
        named_gates: (name, gate) pairs, if they are known already.

    Attributes:
        network: The network itself.
        gates: Its gates as (name, gate) pairs, in the order of its modules.
    """

    def __init__(self, network: nn.Module, named_gates: Optional[List[Tuple[str, Gate]]] = None) -> None:
        self.network = unwrap(network)
        if named_gates is None:
            named_gates = [(name, m) for name, m in self.network.named_modules() if isinstance(m, Gate)]
        self.gates = named_gates

    @classmethod
    def of(cls, model: Union[nn.Module, 'LastPass']) -> 'LastPass':
        """The last pass of a module; a `LastPass` is returned unchanged."""
        return model if isinstance(model, LastPass) else cls(model)

    def logits(self) -> torch.Tensor:
        """Log-odds of all gates, [N, gates]. Raises a ValueError if a gate has other scores."""
        for _, gate in self.gates:
            if not gate.log_odds:
                raise ValueError(
                    f'{type(gate).__name__} does not compute log-odds, which losses on gate probabilities (batch '
                    f'shaping, L0) need.')
        return self.scores()

    def scores(self) -> torch.Tensor:
        """Scores that all gates decided by, log-odds or saliencies, [N, gates]."""
        return torch.cat([logits for _, _, logits in self._checked()], dim=1)

    def masks(self) -> Dict[str, torch.Tensor]:
        """Masks by gate name, [N, num_gates] each, with the gradient that trains the gate."""
        return {name: gate.mask for name, gate, _ in self._checked() if gate.mask is not None}

    def density(self, gather: bool = False) -> Dict[str, torch.Tensor]:
        """Share of open gates in the pass, and under the decision rule of evaluation. See `gate_density`."""
        if not self.gates:
            return {}
        checked = self._checked()
        masks = torch.cat([gate.mask.detach() for _, gate, _ in checked], dim=1)  # type: ignore[union-attr]
        in_evaluation = torch.cat([gate.decide(logits.detach()) for _, gate, logits in checked], dim=1)
        shares = torch.stack((masks.mean(), in_evaluation.mean()))
        if gather:
            shares = average_batches(shares, len(masks))
        return dict(zip(('gate_density', 'gate_density_eval'), shares.unbind(), strict=True))

    def _checked(self) -> List[Tuple[str, Gate, torch.Tensor]]:
        """All gates with their logits. Raises a RuntimeError if there are none, or none that can be trained on."""
        checked = []
        for name, gate in self.gates:
            logits = gate.logits
            if logits is None:
                raise RuntimeError(f"gate '{name}' has seen no input: run the model before its gate losses.")
            if torch.is_grad_enabled() and not logits.requires_grad and any(p.requires_grad for p in gate.parameters()):
                raise RuntimeError(
                    f"the logits of gate '{name}' carry no gradient, so its losses would not train it. If the model "
                    f'uses activation checkpointing, set use_reentrant=False.')
            checked.append((name, gate, logits))
        return checked


def gates(model: Union[nn.Module, LastPass]) -> List[Tuple[str, Gate]]:
    """All gates of a model as (name, gate) pairs, in the order of its modules.

    Names are relative to the model without its DDP or `torch.compile` wrapper.
    """
    return LastPass.of(model).gates


def logit_biases(model: nn.Module) -> Dict[str, torch.Tensor]:
    """The bias that is added last to the logits of each gate, [num_gates], by gate name.

    Adding to a bias moves the threshold of the gate. The values are detached views of the parameters; gates may share
    one. They come from modules with an attribute `logit_biases`, a dictionary by the names of the gates within the
    module. Gates that do not decide by a threshold are missing.
    """
    return {
        '.'.join(filter(None, (prefix, name))): bias.detach()
        for prefix, module in unwrap(model).named_modules()
        for name, bias in getattr(module, 'logit_biases', {}).items()}


def gate_logits(model: Union[nn.Module, LastPass]) -> torch.Tensor:
    """Log-odds of all gates in the last forward pass, [N, gates]. Raises a ValueError if a gate has other scores."""
    return LastPass.of(model).logits()


def gate_scores(model: Union[nn.Module, LastPass]) -> torch.Tensor:
    """Scores that all gates decided by in the last forward pass, log-odds or saliencies, [N, gates]."""
    return LastPass.of(model).scores()


def gate_masks(model: Union[nn.Module, LastPass]) -> Dict[str, torch.Tensor]:
    """Masks of the last forward pass by gate name, [N, num_gates] each, with the gradient that trains the gate."""
    return LastPass.of(model).masks()


def gate_density(model: Union[nn.Module, LastPass], gather: bool = False) -> Dict[str, torch.Tensor]:
    """Share of open gates in the last forward pass, and under the decision rule of evaluation.

    Args:
        model: A model with gates. Soft gates count in part.
        gather: Average over the batches of all processes. All processes must then call this function.
    """
    return LastPass.of(model).density(gather)
