"""Priors of batch shaping

A prior is the target distribution of a feature over the batch. The paper's Beta(0.6, 0.4) makes gates conditional, a
Gaussian acts like batch normalisation, and a uniform prior prepares for quantisation.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

Beyond the paper, the parameters of a prior may be tensors, such as one number per gate, and may be learnt.
"""
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn

from ..utils import widen
from .beta import LARGEST, LEAST, beta_cdf, beta_pdf

__all__ = ['Beta', 'Mixture', 'Normal', 'Prior', 'RelaxedBernoulli', 'Uniform', 'create_prior']

Number = float | torch.Tensor


class Prior(nn.Module):
    """Base of the priors: a distribution with a differentiable CDF.

    A float stays a float, a tensor becomes a buffer, and an `nn.Parameter` a parameter of the module. With `learnable`,
    every float or tensor becomes a parameter. Positive values are then stored as their logarithm, under `log_<name>`,
    and can still be read by their name.
    """

    def cdf(self, x: torch.Tensor) -> torch.Tensor:
        """Probability of values up to `x`."""
        raise NotImplementedError

    def pdf(self, x: torch.Tensor) -> torch.Tensor:
        """Density at `x`."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cdf(x)

    def __getattr__(self, name: str) -> Any:
        logarithm = self.__dict__.get('_parameters', {}).get('log_' + name)
        return super().__getattr__(name) if logarithm is None else logarithm.exp()

    def _set(self, name: str, value: Number, learnable: bool = False, positive: bool = False) -> None:
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        elif learnable:
            tensor = torch.as_tensor(value, dtype=torch.get_default_dtype()).detach().clone()
            if positive:
                name, tensor = 'log_' + name, tensor.log()
            self.register_parameter(name, nn.Parameter(tensor))
        elif isinstance(value, torch.Tensor):
            self.register_buffer(name, value)
        else:
            setattr(self, name, float(value))

    def _repr(self, *names: str) -> str:
        parts = []
        for name in names:
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                value = f'{value.item():.4g}' if value.numel() == 1 else f'<{"x".join(map(str, value.shape))}>'
            else:
                value = f'{value:.4g}'
            parts.append(f'{name}={value}')
        if any(p.requires_grad for p in self.parameters()):
            parts.append('learnable')
        return ', '.join(parts)


class Beta(Prior):
    """Beta distribution on [0, 1]; with both parameters below 1, most of its mass lies near 0 and 1.

    Args:
        a: First shape parameter, between 1e-30 and 1000 (torch.distributions' `concentration1`).
        b: Second shape parameter, between 1e-30 and 1000 (`concentration0`).
        learnable: Whether the parameters are learnt.
    """

    def __init__(self, a: Number = 0.6, b: Number = 0.4, learnable: bool = False) -> None:
        super().__init__()
        self._set('a', _check_positive('a', a, LEAST, LARGEST), learnable, positive=True)
        self._set('b', _check_positive('b', b, LEAST, LARGEST), learnable, positive=True)

    def cdf(self, x: torch.Tensor) -> torch.Tensor:
        return beta_cdf(x, self.a, self.b)

    def pdf(self, x: torch.Tensor) -> torch.Tensor:
        return beta_pdf(x, self.a, self.b)

    def extra_repr(self) -> str:
        return self._repr('a', 'b')


class Uniform(Prior):
    """Uniform distribution. Its CDF is constant outside the interval and gives no gradient there.

    Args:
        low: Lower end.
        high: Upper end, above `low`.
        learnable: Whether the lower end and the width are learnt.
    """

    def __init__(self, low: Number = 0., high: Number = 1., learnable: bool = False) -> None:
        super().__init__()
        _check_finite('low', low)
        _check('high', high, lambda v: v.isfinite() & (v > low), f'finite and above low={_show(low)}')
        _check_positive('high - low', _check_finite('high', high) - low)
        self._set('low', low, learnable)
        if learnable and not isinstance(high, nn.Parameter):
            self._set('width', high - low, learnable, positive=True)
        else:
            self._set('high', high)

    def _width(self) -> Number:
        return self.width if 'log_width' in self._parameters else self.high - self.low

    def cdf(self, x: torch.Tensor) -> torch.Tensor:
        return _clamp((widen(x) - self.low) / self._width()).to(x.dtype)

    def pdf(self, x: torch.Tensor) -> torch.Tensor:
        z = (widen(x) - self.low) / self._width()
        return (((z >= 0) & (z <= 1)).to(z.dtype) / self._width()).to(x.dtype)

    def extra_repr(self) -> str:
        return self._repr('low', 'width' if 'log_width' in self._parameters else 'high')


class Normal(Prior):
    """Normal distribution.

    Args:
        loc: Mean.
        scale: Standard deviation, positive.
        learnable: Whether the parameters are learnt.
    """

    def __init__(self, loc: Number = 0., scale: Number = 1., learnable: bool = False) -> None:
        super().__init__()
        self._set('loc', _check_finite('loc', loc), learnable)
        self._set('scale', _check_positive('scale', scale), learnable, positive=True)

    def cdf(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.ndtr((widen(x) - self.loc) / self.scale).to(x.dtype)

    def pdf(self, x: torch.Tensor) -> torch.Tensor:
        z = (widen(x) - self.loc) / self.scale
        return (torch.exp(-z * z / 2) / (self.scale * math.sqrt(2 * math.pi))).to(x.dtype)

    def extra_repr(self) -> str:
        return self._repr('loc', 'scale')


class RelaxedBernoulli(Prior):
    """Relaxed Bernoulli (binary concrete) distribution on [0, 1], the distribution of a gate's relaxed sample.

    Args:
        temperature: Temperature of the relaxation, positive; below 1, most of the mass lies near 0 and 1.
        probs: Probability of 1, inside (0, 1); 0.6 if neither `probs` nor `logits` is given.
        logits: Log-odds of 1, instead of `probs`.
        learnable: Whether the temperature and the log-odds are learnt.
    """

    def __init__(
            self,
            temperature: Number = 2 / 3,
            probs: Number | None = None,
            logits: Number | None = None,
            learnable: bool = False,
    ) -> None:
        super().__init__()
        if probs is not None and logits is not None:
            raise ValueError(f'only one of probs and logits can be given, got probs={probs} and logits={logits}.')
        self._set('temperature', _check_positive('temperature', temperature), learnable, positive=True)
        if logits is not None:
            _check_finite('logits', logits)
        else:
            probs = 0.6 if probs is None else probs
            _check('probs', probs, lambda v: (v > 0) & (v < 1), 'inside (0, 1)')
            if isinstance(probs, nn.Parameter):
                self._set('probs', probs)
            else:
                logits = torch.logit(probs) if isinstance(probs, torch.Tensor) else math.log(probs / (1 - probs))
        if logits is not None:
            self._set('logits', logits, learnable)

    def _logits(self) -> Number:
        return torch.logit(self.probs) if 'probs' in self._parameters else self.logits

    def _log_odds(self, inside: torch.Tensor) -> torch.Tensor:
        return self.temperature * (torch.log(inside) - torch.log1p(-inside)) - self._logits()

    def cdf(self, x: torch.Tensor) -> torch.Tensor:
        clamped = _clamp(widen(x))
        z = self._log_odds(_inside(clamped, x.dtype))
        # Two equivalent forms, each where its gradient is more accurate.
        cdf = torch.where(z < 0, torch.sigmoid(z), 1 - torch.sigmoid(-z))
        # Exactly 0 and 1 at the ends, with the gradient of the nearest number inside.
        exact = torch.where(clamped == 0, 0, torch.where(clamped == 1, 1, cdf))
        return (cdf + (exact - cdf).detach()).to(x.dtype)

    def pdf(self, x: torch.Tensor) -> torch.Tensor:
        inside = _inside(_clamp(widen(x)), x.dtype)
        z = self._log_odds(inside).abs()
        log_logistic = -z - 2 * torch.log1p(torch.exp(-z))  # log of the logistic density, sigmoid(z) * sigmoid(-z)
        density = self.temperature * torch.exp(log_logistic - torch.log(inside) - torch.log1p(-inside))
        density = density.clamp(max=torch.finfo(x.dtype).max)
        return torch.where((x < 0) | (x > 1), 0, density).to(x.dtype)

    def extra_repr(self) -> str:
        return self._repr('temperature', 'probs' if 'probs' in self._parameters else 'logits')


class Mixture(Prior):
    """Mixture of two priors, whose share may change during training.

    Args:
        first: First prior: an object, a name, or a mapping with its `type`.
        second: Second prior, like `first`.
        share: Weight of the second prior, in [0, 1].
    """

    def __init__(
            self,
            first: Prior | str | Mapping[str, Any],
            second: Prior | str | Mapping[str, Any],
            share: float = 0.5,
    ) -> None:
        super().__init__()
        self.first = create_prior(first)
        self.second = create_prior(second)
        _check('share', share, lambda v: (v >= 0) & (v <= 1), 'in [0, 1]')
        self.share = share

    def cdf(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lerp(self.first.cdf(x), self.second.cdf(x), self.share)

    def pdf(self, x: torch.Tensor) -> torch.Tensor:
        return torch.lerp(self.first.pdf(x), self.second.pdf(x), self.share)

    def extra_repr(self) -> str:
        return f'share={self.share:.4g}'


_PRIORS: dict[str, type[Prior]] = {
    'beta': Beta,
    'uniform': Uniform,
    'normal': Normal,
    'relaxed_bernoulli': RelaxedBernoulli,
    'mixture': Mixture,
}


def create_prior(spec: Prior | str | Mapping[str, Any]) -> Prior:
    """Create a prior from its description, for example from a config.

    Args:
        spec: A prior, which is returned unchanged; a name ('beta', 'uniform', 'normal', 'relaxed_bernoulli'); or a
            mapping with the name under 'type' and the prior's arguments ('mixture' requires `first` and `second`).

    Examples:
        >>> create_prior({'type': 'beta', 'a': 0.6, 'b': 0.4})
        Beta(a=0.6, b=0.4)
    """
    if isinstance(spec, Prior):
        return spec
    kwargs = {'type': spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    if 'type' not in kwargs:
        raise ValueError(
            f"a prior must be a Prior, a name or a mapping with a 'type', one of {list(_PRIORS)}, got {spec!r}.")
    name = kwargs.pop('type')
    if name not in list(_PRIORS):  # a list, since the name may be unhashable
        raise ValueError(f'the type of a prior must be one of {list(_PRIORS)}, got {name!r}.')
    allowed = list(inspect.signature(_PRIORS[name]).parameters)
    for key in kwargs:
        if key not in allowed:
            raise ValueError(f"the arguments of prior '{name}' are {allowed}, got {key!r}.")
    if name == 'mixture' and not {'first', 'second'} <= set(kwargs):
        raise ValueError(f"the prior 'mixture' needs a first and a second prior, got {spec!r}.")
    return _PRIORS[name](**kwargs)


def _check(name: str, value: Any, is_allowed: Callable[[torch.Tensor], torch.Tensor], allowed: str) -> None:
    if isinstance(value, torch.Tensor):
        number = value.dtype != torch.bool
    else:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=torch.float64, device='cpu')  # the default device may be meta
    if not number or not bool(is_allowed(value).all()):
        raise ValueError(f'{name} must be {allowed}, got {_show(value)}.')


def _check_finite(name: str, value: Number) -> Number:
    _check(name, value, lambda v: v.isfinite(), 'finite')
    _check(name, value, lambda v: v.abs() <= 1e30, 'between -1e30 and 1e30')  # safe in float32
    return value


def _check_positive(name: str, value: Number, least: float = 1e-30, largest: float = 1e30) -> Number:
    _check(name, value, lambda v: v.isfinite() & (v > 0), 'positive and finite')
    _check(name, value, lambda v: (v >= least) & (v <= largest), f'between {least:g} and {largest:g}')
    return value


def _show(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _clamp(x: torch.Tensor) -> torch.Tensor:
    """Clamp to [0, 1] with a gradient at both ends, where torch.clamp differs between versions."""
    return torch.where(x < 0, 0, torch.where(x > 1, 1, x))


def _inside(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in [0, 1], with 0 and 1 moved to the nearest normal number inside, and with the gradient of x."""
    info = torch.finfo(dtype)
    moved = torch.where(x == 0, info.tiny, torch.where(x == 1, 1 - info.eps / 2, x))
    return x + (moved - x).detach()
