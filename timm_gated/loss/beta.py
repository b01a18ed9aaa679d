"""CDF and density of the Beta distribution in native torch

Batch shaping compares gates with the CDF of a Beta(0.6, 0.4). PyTorch has no incomplete beta function, and calling
SciPy in the training step costs a device transfer and many times the arithmetic. This implementation stays on the
device and in the tensor's dtype, can be compiled, and is differentiable in `x`, `a` and `b`.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The method is the continued fraction. With y = 1 - x and prefactor = x^a y^b / B(a, b),

    I_x(a, b) =     prefactor / (a * f(x; a, b))    for x up to (a + 1) / (a + b + 2), where f converges fast,
    I_x(a, b) = 1 - prefactor / (b * f(y; b, a))    beyond,
    f(x; a, b) = 1 + d_1 x / (1 + d_2 x / (1 + d_3 x / ...)).

The fraction is truncated at a fixed depth and evaluated from the bottom, with one fused operation per level. The
derivative in x is the density itself, not a derivative of the fraction.
"""
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..utils import check_floating

__all__ = ['beta_cdf', 'beta_pdf']

Number = float | torch.Tensor

# Range of the parameters. Outside it, rounding costs more than a few digits of float32, and the fraction needs hundreds
# of levels.
LEAST, LARGEST = 1e-30, 1e3

# Relative error at which the fraction is truncated if a and b are floats. Reading tensors would synchronise with the
# device, so they use a fixed depth, which reaches this error for parameters up to about 500.
_TOLERANCE = {torch.float32: 1e-8, torch.float64: 1e-14}
_TENSOR_DEPTH = {torch.float32: 64, torch.float64: 144}


def beta_cdf(x: torch.Tensor, a: Number, b: Number) -> torch.Tensor:
    """CDF of Beta(a, b), the regularised incomplete beta function I_x(a, b).

    Half precision is computed in float32 and cast back. Values outside [0, 1] give 0 or 1 with a gradient of 0; NaN
    stays NaN. The gradient in `x` is `beta_pdf(x, a, b)`, finite also at 0 and 1.

    Args:
        x: Points at which the CDF is evaluated.
        a: First shape parameter, between 1e-30 and 1000. Floats are faster; a tensor broadcasts against `x`, may
            require a gradient, and is not range-checked.
        b: Second shape parameter, like `a`.
    """
    x, a, b = _prepare(x, a, b)
    if isinstance(a, torch.Tensor):
        return _TensorBetaCDF.apply(x, a, b)
    return _FloatBetaCDF.apply(x, a, b, x.requires_grad and torch.is_grad_enabled())[0]


def beta_pdf(x: torch.Tensor, a: Number, b: Number) -> torch.Tensor:
    """Density of Beta(a, b).

    Zero outside [0, 1]. At 0 and 1, where the density may be infinite, the result is the density at the nearest normal
    number inside. It is clamped to the largest finite number of the dtype of `x`.

    Args:
        x: Points at which the density is evaluated.
        a: First shape parameter, between 1e-30 and 1000: a float, or a tensor that broadcasts against `x`, may require
            a gradient, and is not range-checked.
        b: Second shape parameter, like `a`.
    """
    x, a, b = _prepare(x, a, b)
    info = torch.finfo(x.dtype)
    inside = torch.where(x <= 0, info.tiny, torch.where(x >= 1, 1 - info.eps / 2, x)).to(_working_dtype(x))
    k = _constants(a, b, inside.dtype)
    density = _exp(*_logs(inside, k), k.a - 1, k.b - 1, k.log_density).clamp(max=info.max)
    return torch.where((x < 0) | (x > 1), 0, density).to(x.dtype)


class _FloatBetaCDF(torch.autograd.Function):
    """The CDF and, if `with_density`, the density, which is stored for the gradient."""

    @staticmethod
    def forward(x: torch.Tensor, a: float, b: float, with_density: bool) -> tuple[torch.Tensor, torch.Tensor]:
        clamped = x.clamp(0, 1).to(_working_dtype(x))
        k = _constants(a, b, clamped.dtype)
        log_x, log_y = _logs(clamped, k)
        left, right = (_float_coefficients(*v, _TOLERANCE[clamped.dtype]) for v in ((a, b), (b, a)))
        cdf = _evaluate(clamped, log_x, log_y, k, left, right)
        if not with_density:
            return cdf.to(x.dtype), x.new_empty(0)
        # With these logarithms, the density costs little more than an exp. They are replaced only where they are -inf,
        # at 0 and 1; a clamp would also replace those of subnormal numbers.
        info = torch.finfo(x.dtype)
        log_x = torch.nan_to_num(log_x, math.nan, math.inf, math.log(info.tiny * k.scale_x))
        log_y = torch.nan_to_num(log_y, math.nan, math.inf, math.log(info.eps / 2 * k.scale_y))
        density = _exp(log_x, log_y, a - 1, b - 1, k.log_density).clamp_(max=info.max)
        density *= clamped.clone().eq_(x)  # 1. inside [0, 1], 0. outside
        return cdf.to(x.dtype), density

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, *ctx.parameters, ctx.with_density = inputs
        ctx.save_for_backward(x, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for the density

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        x, density = ctx.saved_tensors
        if torch.is_grad_enabled() or not ctx.with_density:  # create_graph=True: the stored density has no graph
            density = beta_pdf(x, *ctx.parameters)
        return _grad_x(grad, density, x), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: torch.Tensor, a: float, b: float, with_density: bool) -> tuple:
        return _FloatBetaCDF.apply(x, a, b, with_density), (in_dims[0], in_dims[0] if with_density else None)


class _TensorBetaCDF(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (_opaque_tensor_cdf if torch.compiler.is_compiling() else _tensor_cdf)(x, a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_x(grad, beta_pdf(x, a, b), x)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            opaque = torch.compiler.is_compiling() and not torch.is_grad_enabled()
            cdf_a, cdf_b = (_opaque_parameter_derivatives if opaque else _parameter_derivatives)(x, a, b)
            grad_a = (grad * cdf_a).sum_to_size(a.shape).to(a.dtype)
            grad_b = (grad * cdf_b).sum_to_size(b.shape).to(b.dtype)
        return grad_x, grad_a, grad_b

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *tensors: torch.Tensor) -> tuple[torch.Tensor, int]:
        # Move the batch dimension to the front, and give all tensors equally many dimensions.
        moved = [v[None] if dim is None else v.movedim(dim, 0) for v, dim in zip(tensors, in_dims, strict=True)]
        ndim = max(v.ndim for v in moved)
        x, a, b = (v.reshape(v.shape[0], *(1,) * (ndim - v.ndim), *v.shape[1:]) for v in moved)
        return beta_cdf(x, a, b), 0


def _grad_x(grad: torch.Tensor, density: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(x.dtype).max
    return (grad.to(_working_dtype(x)) * density).clamp(-limit, limit).to(x.dtype)


class _Constants(NamedTuple):
    """Constants that depend on the parameters only: floats, or tensors of the dtype of `x`."""
    a: Any
    b: Any
    split: Any  # x up to which the left fraction is used
    scale_x: Any  # powers of two (exact) that bring the means of x and y near 1: their logarithms are then small, and
    scale_y: Any  # so are the rounding errors that a and b multiply
    log_prefactor: Any  # logarithm of the constant factor of the prefactor, given these scales
    log_density: Any  # logarithm of the constant factor of the density


def _constants(a: Any, b: Any, dtype: torch.dtype) -> _Constants:
    scale_x: Any
    scale_y: Any
    log_beta: Any
    if isinstance(a, torch.Tensor):
        scale_x, scale_y = (torch.log2((a + b) / v).round().clamp(max=100).exp2() for v in (a, b))
        log_beta = torch.lgamma(a) + torch.lgamma(b) - torch.lgamma(a + b)
        log_scale_x, log_scale_y = scale_x.log(), scale_y.log()
    else:
        scale_x, scale_y = (2. ** min(round(math.log2((a + b) / v)), 100) for v in (a, b))
        log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
        log_scale_x, log_scale_y = math.log(scale_x), math.log(scale_y)
    constants = _Constants(
        a=a,
        b=b,
        split=(a + 1) / (a + b + 2),
        scale_x=scale_x,
        scale_y=scale_y,
        log_prefactor=-log_beta - a * log_scale_x - b * log_scale_y,
        log_density=-log_beta - (a - 1) * log_scale_x - (b - 1) * log_scale_y,
    )
    return _Constants(*(v.to(dtype) for v in constants)) if isinstance(a, torch.Tensor) else constants


def _logs(x: torch.Tensor, k: _Constants) -> tuple[torch.Tensor, torch.Tensor]:
    """log(scale_x * x) and log(scale_y * (1 - x))."""
    y = 1 - x
    # Below 1/2, y is rounded, and b multiplies the error. The second term corrects the logarithm.
    log_y = torch.addcdiv(torch.log(y * k.scale_y), (1 - y).sub_(x), y.clamp(min=0.5))
    return torch.log(x * k.scale_x), log_y


def _exp(log_x: torch.Tensor, log_y: torch.Tensor, p: Any, q: Any, r: Any) -> torch.Tensor:
    """exp(p * log_x + q * log_y + r)."""
    # In place, here and below: on a CPU, allocating memory costs as much as the arithmetic.
    total = log_x * p
    total += log_y * q
    total += r
    return total.exp_()


def _evaluate(
        x: torch.Tensor,
        log_x: torch.Tensor,
        log_y: torch.Tensor,
        k: _Constants,
        left_coefficients: Sequence[Any],
        right_coefficients: Sequence[Any],
) -> torch.Tensor:
    """The CDF for x in [0, 1]."""
    prefactor = _exp(log_x, log_y, k.a, k.b, k.log_prefactor)  # exactly 0 at 0 and at 1
    left = prefactor / _fraction(x.clamp(max=k.split), left_coefficients).mul_(k.a)
    right = prefactor.div_(_fraction((1 - x).clamp_(max=1 - k.split), right_coefficients).mul_(k.b)).neg_().add_(1)
    # lerp with a weight of 0 or 1: on a CPU, torch.where costs as much as both fractions. Rounding may exceed 1.
    return left.lerp_(right, (x - k.split).sign_().relu_()).clamp_(max=1)


def _fraction(x: torch.Tensor, coefficients: Sequence[Any]) -> torch.Tensor:
    """f(x), evaluated from the bottom."""
    one = torch.ones((), dtype=x.dtype, device=x.device)
    f = torch.ones_like(x)
    for d in reversed(coefficients):
        out = None if torch.compiler.is_compiling() else f  # the compiler needs a contiguous `out`
        if isinstance(d, torch.Tensor):
            f = torch.addcdiv(one, d * x, f, out=out)
        else:
            f = torch.addcdiv(one, x, f, value=d, out=out)
    return f


def _float_coefficients(a: float, b: float, tolerance: float) -> list[float]:
    """d_1, d_2, ... of f(x; a, b), enough to converge at the split, where convergence is slowest."""
    x = (a + 1) / (a + b + 2)
    coefficients: list[float] = []
    numerator, denominator = 1., math.inf  # ratios of successive convergents' numerators and denominators
    while abs(numerator / denominator - 1) > tolerance and len(coefficients) < 10_000:
        j = len(coefficients) + 1
        m = j // 2
        d = (-(a + m) * (a + b + m) if j % 2 else m * (b - m)) / ((a + (j - 1)) * (a + j))
        coefficients.append(d)
        numerator, denominator = 1 + d * x / numerator, 1 + d * x / denominator
    return coefficients


def _tensor_coefficients(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """(d_j, its derivative in a, its derivative in b) for j = 1, 2, ... of f(x; a, b)."""
    j = torch.arange(1, _TENSOR_DEPTH[dtype] + 1, dtype=a.dtype, device=a.device).view(-1, *(1,) * a.ndim)
    m = (j / 2).floor()
    odd = j > 2 * m
    before = a + (j - 1)  # this order keeps a tiny a
    ratio, ratio_a = torch.where(odd, -(a + m), m) / before, -m / before / before  # and its derivative in a
    factor = torch.where(odd, a + b + m, b - m) / (a + j)
    d = ratio * factor
    d_a = ratio_a * factor + ratio * (odd.to(a.dtype) - factor) / (a + j)
    d_b = ratio / (a + j)
    return list(zip(*(v.to(dtype).unbind() for v in (d, d_a, d_b)), strict=True))


# Two functions with long unrolled loops are opaque to torch.compile, which would otherwise take minutes. They return
# contiguous tensors, as their fake versions do. The loops for floats are short and can be fused.
def _tensor_cdf(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    clamped = x.clamp(0, 1).to(_working_dtype(x))
    k = _constants(a, b, clamped.dtype)
    left, right = ([d for d, _, _ in _tensor_coefficients(*v, clamped.dtype)] for v in ((a, b), (b, a)))
    return _evaluate(clamped, *_logs(clamped, k), k, left, right).to(x.dtype)


@torch.library.custom_op('timm_gated::beta_cdf', mutates_args=())
def _opaque_tensor_cdf(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _tensor_cdf(x, a, b).contiguous()


@_opaque_tensor_cdf.register_fake
def _(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op('timm_gated::beta_cdf_parameter_derivatives', mutates_args=())
def _opaque_parameter_derivatives(
        x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cdf_a, cdf_b = _parameter_derivatives(x, a, b)
    return cdf_a.contiguous(), cdf_b.contiguous()


@_opaque_parameter_derivatives.register_fake
def _(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=_working_dtype(x)), x.new_empty(x.shape, dtype=_working_dtype(x))


def _parameter_derivatives(
        x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives of the CDF in a and b, in differentiable operations; 0 at both ends."""
    outside = (x <= 0) | (x >= 1)
    x = torch.where(outside, 0.5, x).to(_working_dtype(x))
    k = _constants(a, b, x.dtype)
    log_x, log_y = _logs(x, k)
    prefactor = _exp(log_x, log_y, k.a, k.b, k.log_prefactor)
    in_left = x <= k.split
    f, log_f_a, log_f_b = _fraction_derivatives(torch.where(in_left, x, 0), a, b)
    g, log_g_b, log_g_a = _fraction_derivatives(torch.where(in_left, 0, 1 - x), b, a)
    left, right = prefactor / (k.a * f), prefactor / (k.b * g)
    # Logarithmic derivatives of prefactor / a in a and of prefactor / b in b. Without the divisor, add its inverse.
    log_a = log_x + (torch.digamma(a + b) - torch.digamma(a + 1) - k.scale_x.to(a.dtype).log()).to(x.dtype)
    log_b = log_y + (torch.digamma(a + b) - torch.digamma(b + 1) - k.scale_y.to(b.dtype).log()).to(x.dtype)
    cdf_a = torch.where(in_left, left * (log_a - log_f_a), right * (log_g_a - log_a - 1 / k.a))
    cdf_b = torch.where(in_left, left * (log_b + 1 / k.b - log_f_b), right * (log_g_b - log_b))
    return cdf_a.masked_fill(outside, 0), cdf_b.masked_fill(outside, 0)


def _fraction_derivatives(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """f(x; a, b) and the derivatives of its logarithm in a and b."""
    f, log_f_a, log_f_b = torch.ones_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for d, d_a, d_b in reversed(_tensor_coefficients(a, b, x.dtype)):
        ratio = x / f
        f = 1 + d * ratio
        ratio = ratio / f
        log_f_a, log_f_b = ratio * (d_a - d * log_f_a), ratio * (d_b - d * log_f_b)
    return f, log_f_a, log_f_b


def _prepare(x: torch.Tensor, a: Any, b: Any) -> tuple[torch.Tensor, Any, Any]:
    """Both parameters as floats, or both as tensors of the same shape; and x, expanded to that shape.

    Parameter tensors are float64 where the device supports it, since float32 would cost digits in the constants.
    Tensors of the size of x keep their dtype.
    """
    check_floating(x)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        dtype = torch.float32 if x.device.type == 'mps' else torch.float64
        a, b = torch.broadcast_tensors(*(torch.as_tensor(v, device=x.device).to(dtype) for v in (a, b)))
        return x.expand(torch.broadcast_shapes(x.shape, a.shape)), a, b
    if not (0 < a < math.inf and 0 < b < math.inf):
        raise ValueError(f'the parameters of a Beta distribution must be positive and finite, got a={a} and b={b}.')
    if min(a, b) < LEAST or max(a, b) > LARGEST:
        raise ValueError(
            f'the parameters of a Beta distribution must be between {LEAST:g} and {LARGEST:g}, got a={a} and b={b}.')
    return x, float(a), float(b)


def _working_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
