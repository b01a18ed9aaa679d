"""The Beta CDF and density against SciPy: values and all gradients, at the ends and in every dtype"""
import math
import shutil

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from timm_gated.loss.beta import beta_cdf, beta_pdf

PARAMETERS = [(0.6, 0.4), (0.1, 0.1), (0.1, 10.), (10., 0.1), (10., 10.), (1., 1.), (2., 1.), (0.5, 3.), (4.4, 9.2)]
EXTREME_PARAMETERS = [
    (0.01, 0.01), (0.01, 500.), (500., 0.01), (50., 50.), (0.01, 50.), (500., 500.), (1e-30, 1.), (1., 1e-30),
    (1e-30, 1e-30), (1e-30, 1000.), (1e-12, 1.), (1e-17, 3.), (1e-8, 1e-4), (1000., 1000.), (1000., 1.7)]
CDF_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}
DENSITY_TOLERANCE = {torch.float32: 5e-5, torch.float64: 1e-11}


def points(dtype: torch.dtype) -> torch.Tensor:
    """Points in [0, 1]: both ends and their neighbours, subnormal numbers, and every order of magnitude."""
    info = torch.finfo(dtype)
    ends = torch.tensor([0, info.smallest_normal / 8, info.tiny, 1e-30, 1 - info.eps, 1 - info.eps / 2, 1], dtype=dtype)
    small = torch.logspace(-37, -0.01, 300, dtype=dtype)
    even = torch.linspace(0, 1, 2001, dtype=dtype)
    return torch.cat([ends, small, 1 - small[small > info.eps], even])


def scipy_cdf(x: torch.Tensor, a: float, b: float) -> np.ndarray:
    return scipy.special.betainc(a, b, x.double().numpy())


def density(x: torch.Tensor, a: float, b: float) -> np.ndarray:
    """The density inside (0, 1), in float64."""
    x = x.double().numpy()
    return np.exp((a - 1) * np.log(x) + (b - 1) * np.log1p(-x) - scipy.special.betaln(a, b))


def grad_of_cdf(x: torch.Tensor, a, b) -> torch.Tensor:
    x = x.detach().requires_grad_()
    grad, = torch.autograd.grad(beta_cdf(x, a, b).sum(), x)
    return grad


@pytest.fixture(params=['float', 'tensor'])
def as_parameter(request):
    """Parameters as floats and as tensors, which are evaluated differently."""
    return float if request.param == 'float' else lambda value: torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('a, b', PARAMETERS)
def test_cdf_is_scipys(a, b, dtype, as_parameter):
    x = points(dtype)
    cdf = beta_cdf(x, as_parameter(a), as_parameter(b))
    assert cdf.dtype == dtype and cdf.shape == x.shape
    np.testing.assert_allclose(cdf.double().numpy(), scipy_cdf(x, a, b), rtol=0, atol=CDF_TOLERANCE[dtype])
    assert beta_cdf(torch.tensor([0., 1.], dtype=dtype), as_parameter(a), as_parameter(b)).tolist() == [0, 1]


@pytest.mark.parametrize('dtype, atol', [(torch.float32, 1e-5), (torch.float64, 5e-12)])
@pytest.mark.parametrize('a, b', EXTREME_PARAMETERS)
def test_cdf_of_extreme_parameters(a, b, dtype, atol, as_parameter):
    x = points(dtype)[2:]  # SciPy is less accurate at subnormal numbers
    cdf = beta_cdf(x, as_parameter(a), as_parameter(b))
    np.testing.assert_allclose(cdf.double().numpy(), scipy_cdf(x, a, b), rtol=0, atol=atol)


@examples(100)
@given(
    a=st.floats(math.log(1e-30), math.log(1e3)).map(math.exp),
    b=st.floats(math.log(1e-30), math.log(1e3)).map(math.exp),
    p=st.lists(st.floats(1e-3, 0.999), min_size=1, max_size=20),
)
def test_cdf_over_the_whole_range_of_parameters(a, b, p):
    a, b = (min(max(value, 1e-30), 1e3) for value in (a, b))  # exp of log rounds
    x = torch.from_numpy(np.nan_to_num(scipy.special.betaincinv(a, b, np.array(p))))
    for parameters in ((a, b), (torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))):
        for points, atol in ((x, 1e-11), (x.float(), 5e-5)):
            cdf = beta_cdf(points, *parameters)
            np.testing.assert_allclose(cdf.double().numpy(), scipy_cdf(points, a, b), rtol=0, atol=atol)


@examples(60)
@given(
    a=st.floats(math.log(0.1), math.log(10)).map(math.exp),
    b=st.floats(math.log(0.1), math.log(10)).map(math.exp),
    x=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50),
)
def test_cdf_properties(a, b, x):
    x32 = torch.tensor(x)
    cdf = beta_cdf(x32, a, b)
    np.testing.assert_allclose(cdf.double().numpy(), scipy_cdf(x32, a, b), rtol=0, atol=1e-6)
    x64 = x32.double().sort().values
    cdf = beta_cdf(x64, a, b)
    np.testing.assert_allclose(cdf.numpy(), scipy_cdf(x64, a, b), rtol=0, atol=1e-10)
    assert (cdf.diff() >= -1e-14).all()
    torch.testing.assert_close(1 - beta_cdf(1 - x64, b, a), beta_cdf(1 - (1 - x64), a, b), rtol=0, atol=1e-13)


def test_closed_forms():
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    for (a, b), expected in {
            (1., 1.): x,
            (2., 1.): x ** 2,
            (1., 2.): 1 - (1 - x) ** 2,
            (2., 2.): 3 * x ** 2 - 2 * x ** 3,
            (0.5, 0.5): 2 / math.pi * torch.asin(x.sqrt()),
    }.items():
        torch.testing.assert_close(beta_cdf(x, a, b), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(beta_pdf(x, 2., 2.), 6 * x * (1 - x), rtol=0, atol=1e-14)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('a, b', PARAMETERS + EXTREME_PARAMETERS)
def test_gradient_is_the_density(a, b, dtype, as_parameter):
    x = points(dtype)
    x = x[(x > 0) & (x < 1)]
    info = torch.finfo(dtype)
    with np.errstate(over='ignore'):
        expected = np.minimum(density(x, a, b), info.max)
    scale = max(1, (a + b) / 20)
    for actual in (grad_of_cdf(x, as_parameter(a), as_parameter(b)), beta_pdf(x, as_parameter(a), as_parameter(b))):
        np.testing.assert_allclose(
            actual.double().numpy(), expected, rtol=scale * DENSITY_TOLERANCE[dtype], atol=1e-30)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize('a, b', [(0.6, 0.4), (0.1, 0.1), (0.01, 0.01), (1., 1.), (3., 2.)])
def test_ends_have_the_density_of_the_nearest_number_inside(a, b, dtype, as_parameter):
    info = torch.finfo(dtype)
    a, b = as_parameter(a), as_parameter(b)
    inside = torch.tensor([info.tiny, 1 - info.eps / 2], dtype=dtype)
    for fn in (grad_of_cdf, beta_pdf):
        ends = fn(torch.tensor([0., 1.], dtype=dtype), a, b)
        assert ends.isfinite().all()
        torch.testing.assert_close(ends, fn(inside, a, b), rtol=1e-2 if dtype == torch.bfloat16 else 1e-3, atol=0)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('a, b', [(0.6, 0.4), (0.1, 0.1), (0.01, 0.5)])
def test_half_precision_is_finite_and_accurate_everywhere(a, b, dtype, as_parameter):
    x = torch.arange(2 ** 15, dtype=torch.int16).view(dtype)  # every non-negative number
    x = x[(x >= 0) & (x <= 1)].requires_grad_()
    cdf = beta_cdf(x, as_parameter(a), as_parameter(b))
    assert cdf.dtype == dtype
    info = torch.finfo(dtype)
    expected = scipy_cdf(x.detach(), a, b)
    np.testing.assert_allclose(cdf.detach().double().numpy(), expected, rtol=info.eps, atol=info.smallest_normal / 100)
    cdf.backward(torch.full_like(cdf, 1000))  # as with loss scaling: the product may overflow too
    assert x.grad.dtype == dtype and x.grad.isfinite().all() and (x.grad > 0).all()


def test_infinite_density_is_clamped(as_parameter):
    x = torch.tensor([1e-45], requires_grad=True)
    cdf = beta_cdf(x, as_parameter(0.01), as_parameter(1.))
    for upstream, expected in ((0., 0.), (1., torch.finfo(torch.float32).max), (-10., -torch.finfo(torch.float32).max)):
        grad, = torch.autograd.grad(cdf, x, torch.tensor([upstream]), retain_graph=True)
        assert grad.item() == expected


def test_outside_the_unit_interval_and_nan(as_parameter):
    a, b = as_parameter(0.6), as_parameter(0.4)
    x = torch.tensor([-math.inf, -1, -1e-30, 1 + 1e-6, 2, math.inf])
    assert beta_cdf(x, a, b).tolist() == [0, 0, 0, 1, 1, 1]
    assert grad_of_cdf(x, a, b).tolist() == [0] * 6
    assert beta_pdf(x, a, b).tolist() == [0] * 6
    nan = torch.tensor([math.nan])
    assert beta_cdf(nan, a, b).isnan() and beta_pdf(nan, a, b).isnan() and grad_of_cdf(nan, a, b).isnan()


@pytest.mark.parametrize('a, b', [(0.6, 0.4), (0.1, 3.), (7., 0.2), (10., 10.), (50., 20.)])
def test_parameter_gradients_are_scipys(a, b):
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    tensors = [torch.full_like(x, v, requires_grad=True) for v in (a, b)]
    grads = torch.autograd.grad(beta_cdf(x, *tensors).sum(), tensors)
    for grad, da, db in zip(grads, (1, 0), (0, 1), strict=True):
        h = 1e-3 * (a if da else b)
        stencil = ((-2, 1), (-1, -8), (1, 8), (2, -1))  # central differences of fourth order
        expected = sum(w * scipy_cdf(x, a + i * h * da, b + i * h * db) for i, w in stencil) / (12 * h)
        np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-5, atol=1e-12)
        assert grad[0] == 0 and grad[-1] == 0


@pytest.mark.parametrize('a', [1e-30, 1e-17, 1e-9, 0.3, 1000.])
def test_parameter_gradient_of_extreme_parameters(a):
    x = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    first, second = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (a, 1.))
    grads = [torch.autograd.grad(value, (first, second), retain_graph=True) for value in beta_cdf(x, first, second)]
    torch.testing.assert_close(torch.stack([grad for grad, _ in grads]), x ** a * x.log(), rtol=1e-11, atol=0)
    mirrored, = torch.autograd.grad(beta_cdf(1 - x, 1., first).sum(), first)
    torch.testing.assert_close(mirrored, -(x ** a * x.log()).sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
def test_parameter_gradients_are_finite(dtype):
    x = torch.tensor([0., 1e-45, 1e-30, 0.3, 1 - 2 ** -24, 1., -1., 2.]).to(dtype)
    for value in (0.01, 0.6, 500.):
        a, b = (torch.tensor(value, requires_grad=True) for _ in range(2))
        cdf = beta_cdf(x[:, None], a, b)
        for grad in torch.autograd.grad(cdf.sum(), (a, b)):
            assert grad.isfinite() and grad.shape == () and grad.dtype == torch.float32


def test_gradcheck_and_gradgradcheck():
    torch.manual_seed(0)
    x = (0.05 + 0.9 * torch.rand(5, 3, dtype=torch.float64)).requires_grad_()
    a, b = ((0.3 + torch.rand(3, dtype=torch.float64)).requires_grad_() for _ in range(2))
    with torch.no_grad():
        x[0, 0], a[0], b[0] = 0.5, 0.7, 0.7  # exactly at the split
    assert torch.autograd.gradcheck(lambda x: beta_cdf(x, 0.6, 0.4), x)
    assert torch.autograd.gradgradcheck(lambda x: beta_cdf(x, 0.6, 0.4), x)
    assert torch.autograd.gradcheck(beta_cdf, (x, a, b))
    assert torch.autograd.gradgradcheck(beta_cdf, (x, a, b))
    assert torch.autograd.gradcheck(beta_pdf, (x, a, b))
    assert torch.autograd.gradcheck(lambda a: beta_cdf(x.detach(), a, 0.4), a)  # a learnable parameter and a float


def test_broadcasting():
    x = torch.rand(4, 3)
    a, b = torch.tensor([0.5, 1., 2.]), torch.tensor([[0.3], [0.6], [0.9], [1.2]])
    for fn in (beta_cdf, beta_pdf):
        expected = [[fn(x[i, j], a[j].item(), b[i].item()) for j in range(3)] for i in range(4)]
        torch.testing.assert_close(fn(x, a, b), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    scalar = torch.tensor(0.5, requires_grad=True)
    beta_cdf(scalar, a, 1.).sum().backward()
    torch.testing.assert_close(scalar.grad, beta_pdf(scalar.detach(), a, 1.).sum())


def test_compiles_to_one_graph(as_parameter):
    torch._dynamo.reset()
    # Inductor is slow; the test of the losses covers it with constants.
    backend = 'inductor' if shutil.which('g++') and as_parameter is not float else 'aot_eager'
    x = torch.cat([torch.rand(95), torch.tensor([0., 1., -1., 2., 1e-40])]).view(20, 5).t().requires_grad_()
    a, b = as_parameter(0.6), as_parameter(0.4)
    inputs = [v.requires_grad_() for v in (x, a, b) if isinstance(v, torch.Tensor)]
    eager, compiled = (fn(x, a, b) for fn in (beta_cdf, torch.compile(beta_cdf, fullgraph=True, backend=backend)))
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-6)
    for actual, expected in zip(
            torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(eager.sum(), inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_function_transforms(as_parameter):
    x = torch.tensor([0., 0.1, 0.5, 0.9, 1.2], dtype=torch.float64)
    a, b = as_parameter(0.6), as_parameter(0.4)

    def cdf(value):
        return beta_cdf(value, a, b).sum()

    density = beta_pdf(x, a, b)
    torch.testing.assert_close(torch.func.grad(cdf)(x), density)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(cdf))(x), density)
    torch.testing.assert_close(torch.func.grad(lambda values: torch.func.vmap(cdf)(values).sum())(x), density)
    torch.testing.assert_close(torch.func.jacrev(cdf)(x), density)
    inside = x[1:4]
    expected = torch.autograd.functional.hessian(cdf, inside)
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(cdf))(inside), expected)
    images = torch.rand(3, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(
        torch.func.vmap(lambda v: beta_cdf(v, a, b), in_dims=1, out_dims=1)(images), beta_cdf(images, a, b))


@pytest.mark.parametrize('in_dims', [(0, None), (None, 0), (0, 0), (1, 0)])
def test_function_transforms_over_parameters(in_dims):
    x, a = torch.rand(3, 3, dtype=torch.float64), torch.tensor([0.5, 1., 2.], dtype=torch.float64)

    def cdf(x, a):
        return beta_cdf(x, a, 0.7).sum()

    transformed = torch.func.vmap(torch.func.grad(cdf, argnums=(0, 1)), in_dims)(x, a)
    samples = [tuple(v if dim is None else v.select(dim, i) for v, dim in zip((x, a), in_dims, strict=True))
               for i in range(3)]
    expected = [torch.autograd.grad(cdf(*leaves), leaves) for leaves in (
        tuple(v.clone().requires_grad_() for v in sample) for sample in samples)]
    for actual, values in zip(transformed, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(values))


@pytest.mark.parametrize('a, b', [(1e-31, 1.), (1., 5e-324), (1001., 1.), (1e30, 1e30), (2, 10 ** 400)])
def test_parameters_out_of_range(a, b):
    for fn in (beta_cdf, beta_pdf):
        with pytest.raises(ValueError, match='must be between 1e-30 and 1000, got a='):
            fn(torch.rand(2), a, b)


@pytest.mark.parametrize('a, b', [(0., 1.), (1., -2.), (math.nan, 1.), (1., math.inf)])
def test_bad_parameters(a, b):
    for fn in (beta_cdf, beta_pdf):
        with pytest.raises(ValueError, match=f'must be positive and finite, got a={a} and b={b}'):
            fn(torch.rand(2), a, b)


@pytest.mark.parametrize('x', [torch.tensor([0, 1]), torch.tensor([False, True])])
def test_bad_dtype(x):
    for fn in (beta_cdf, beta_pdf):
        with pytest.raises(ValueError, match=f'floating-point tensor, got {x.dtype}'):
            fn(x, 0.6, 0.4)
