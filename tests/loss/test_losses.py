"""Batch shaping and L0: by hand, against SciPy, and properties that training relies on"""
import math
import shutil

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, priors, quantiles, seeds

from timm_gated.loss.gate_losses import BatchShapingLoss, L0Loss, batch_shaping_loss, check_reduction, l0_loss
from timm_gated.loss.priors import Beta, Normal, Prior, RelaxedBernoulli, Uniform

REDUCTIONS = ['none', 'sum', 'mean']


def reduce(per_gate: torch.Tensor, reduction: str) -> torch.Tensor:
    return {'none': per_gate, 'sum': per_gate.sum(), 'mean': per_gate.mean()}[reduction]


@pytest.mark.parametrize('reduction', REDUCTIONS)
def test_batch_shaping_by_hand(reduction):
    # N = 2, uniform prior: the targets are 1/3 and 2/3, the CDF of x is x.
    x = torch.tensor([[0.9, 0.2, 1 / 3], [0.1, 0.2, 2 / 3]], dtype=torch.float64, requires_grad=True)
    per_gate = torch.tensor([
        ((1 / 3 - 0.1) ** 2 + (2 / 3 - 0.9) ** 2) / 2,
        ((1 / 3 - 0.2) ** 2 + (2 / 3 - 0.2) ** 2) / 2,  # a tie
        0.,
    ], dtype=torch.float64)
    loss = batch_shaping_loss(x, Uniform(), reduction)
    torch.testing.assert_close(loss, reduce(per_gate, reduction), rtol=0, atol=1e-15)
    loss.sum().backward()
    # Per gate, 2 / N * (x - target) * density; the order of tied values is arbitrary.
    grad = x.grad * (3 if reduction == 'mean' else 1)
    torch.testing.assert_close(grad[:, 0], torch.tensor([0.9 - 2 / 3, 0.1 - 1 / 3], dtype=torch.float64))
    torch.testing.assert_close(grad[:, 1].sort().values, torch.tensor([0.2 - 2 / 3, 0.2 - 1 / 3], dtype=torch.float64))
    torch.testing.assert_close(grad[:, 2], torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-15)


def test_batch_shaping_of_one_sample():
    loss = batch_shaping_loss(torch.tensor([[0.9, 0.5]]), Uniform(), 'none')  # the target is 1/2
    torch.testing.assert_close(loss, torch.tensor([0.16, 0.]))


@pytest.mark.parametrize('reduction', REDUCTIONS)
def test_batch_shaping_is_the_papers_with_scipy(reduction):
    torch.manual_seed(0)
    n, gates = 37, 11
    x = torch.rand(n, gates).pow(3).requires_grad_()
    loss = batch_shaping_loss(x, reduction=reduction)

    # The pseudo-code of the paper's appendix, with the 1/N of its equation.
    values = x.detach().double().numpy()
    order = values.argsort(0)
    ordered = np.take_along_axis(values, order, 0)
    difference = np.arange(1, n + 1)[:, None] / (n + 1) - scipy.special.betainc(0.6, 0.4, ordered)
    expected = reduce(torch.from_numpy((difference ** 2).mean(0)), reduction)
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-5, atol=1e-7)

    density = ordered ** -0.4 * (1 - ordered) ** -0.6 / scipy.special.beta(0.6, 0.4)
    grad = np.empty_like(values)
    np.put_along_axis(grad, order, -2 / n * density * difference, 0)
    loss.sum().backward()
    expected = torch.from_numpy(grad) / (gates if reduction == 'mean' else 1)
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-4, atol=1e-6)


@examples(50)
@given(prior=priors(least=0.4), n=st.integers(1, 20), seed=seeds)
def test_perfect_quantiles_have_no_loss_and_no_gradient(prior, n, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    x = quantiles(prior, torch.arange(1, n + 1, dtype=torch.float64) / (n + 1))[order, None].requires_grad_()
    loss = batch_shaping_loss(x, prior)
    loss.backward()
    assert loss < 1e-20 and x.grad.abs().max() < 1e-9


@st.composite
def batches(draw) -> torch.Tensor:
    """Few distinct values, so that there are ties, and both ends, where a density may be infinite."""
    n, gates = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    value = st.sampled_from([0., 1e-30, 0.25, 0.5, 0.75, 1.]) | st.floats(0, 1, width=32)
    return torch.tensor(draw(st.lists(value, min_size=n * gates, max_size=n * gates))).view(n, gates)


def loss_and_gradient(x: torch.Tensor, prior: Prior) -> tuple:
    x = x.clone().requires_grad_()
    loss = batch_shaping_loss(x, prior, 'none')
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


@examples(100)
@given(data=st.data(), x=batches(), prior=priors())
def test_batch_shaping_properties(data, x, prior):
    permutation = torch.tensor(data.draw(st.permutations(range(len(x)))))
    loss, grad = loss_and_gradient(x, prior)
    assert loss.shape == (x.shape[1],) and (loss >= 0).all() and (loss <= 1).all()
    assert grad.isfinite().all()
    permuted_loss, permuted_grad = loss_and_gradient(x[permutation], prior)
    torch.testing.assert_close(permuted_loss, loss, rtol=1e-5, atol=1e-7)
    # Each gate separately.
    torch.testing.assert_close(batch_shaping_loss(x[:, :1], prior), loss[0], rtol=1e-5, atol=1e-7)
    # The order of ties is arbitrary, so compare the summed gradients of each tied value.
    for gate in range(x.shape[1]):
        for value in x[:, gate].unique():
            ours, theirs = (g[v[:, gate] == value, gate].double().sum() for g, v in (
                (grad, x), (permuted_grad, x[permutation])))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * grad.abs().max().double().item())


@examples(40)
@given(prior=priors(least=0.4), n=st.integers(1, 20), value=st.floats(0, 1, width=32))
def test_a_gate_that_never_changes(prior, n, value):
    """If all values are tied, the loss is the mean over all ranks, and the gradient points to the prior's median."""
    x = torch.full((n, 1), value, dtype=torch.float64)
    loss, grad = loss_and_gradient(x, prior)
    cdf = prior.cdf(x[0, 0])
    targets = torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)
    torch.testing.assert_close(loss[0], (targets - cdf).square().mean())
    torch.testing.assert_close(grad.sum(), 2 * (cdf - 0.5) * prior.pdf(x[0, 0]), rtol=1e-6, atol=1e-9)


def test_permutation_permutes_the_gradient():
    torch.manual_seed(0)
    x = torch.rand(64, 5)
    permutation = torch.randperm(64)
    grads = []
    for batch in (x, x[permutation]):
        batch = batch.clone().requires_grad_()
        grads += torch.autograd.grad(batch_shaping_loss(batch), batch)
    torch.testing.assert_close(grads[1], grads[0][permutation])


@pytest.mark.parametrize('prior', [Beta(), Beta(0.6, 0.4, learnable=True), Normal(learnable=True)], ids=str)
def test_gradcheck(prior):
    torch.manual_seed(0)
    prior = prior.double()
    x = (0.1 + 0.8 * torch.rand(6, 2, dtype=torch.float64)).requires_grad_()
    inputs = (x, *prior.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: batch_shaping_loss(x, prior, 'none'), inputs)
    assert torch.autograd.gradgradcheck(lambda x, *_: batch_shaping_loss(x, prior, 'none'), inputs)


@pytest.mark.parametrize('learnable', [False, True])
def test_descent_shapes_a_gate(learnable):
    torch.manual_seed(0)
    logits = torch.randn(200, 3).mul(0.1).add(2).requires_grad_()
    loss_fn = BatchShapingLoss(Beta(0.6, 0.4, learnable=learnable))
    optimizer = torch.optim.Adam([logits], lr=0.3)
    first = last = loss_fn(torch.sigmoid(logits)).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss = loss_fn(torch.sigmoid(logits))
        loss.backward()
        optimizer.step()
        last = loss.item()
    assert last < first / 100
    assert torch.sigmoid(logits).mean().item() == pytest.approx(0.6, abs=0.05)  # the prior's mean


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('prior', [Beta(), Beta(0.05, 0.05), RelaxedBernoulli(0.1), Normal()], ids=str)
def test_half_precision_is_computed_in_float32(dtype, prior):
    bits = torch.arange(2 ** 15, dtype=torch.int16)
    x = bits.view(dtype)
    x = x[(x >= 0) & (x <= 1)]
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))][:4096].view(64, 64)
    x[0, 0], x[1, 0] = 0, 1
    x = x.clone().requires_grad_()
    loss = batch_shaping_loss(x, prior)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, batch_shaping_loss(x.detach().float(), prior), rtol=1e-6, atol=0)
    (1e4 * loss).backward()
    assert x.grad.dtype == dtype and x.grad.isfinite().all()
    logits = torch.tensor([[20., -30.]], dtype=dtype)
    assert l0_loss(logits).dtype == torch.float32
    assert l0_loss(logits).item() == pytest.approx(0.5, abs=1e-6)


def test_autocast_is_off_inside():
    class Product(Prior):
        def cdf(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.eye(x.shape[1])  # bfloat16 under autocast

    torch.manual_seed(0)
    x = torch.rand(32, 4)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        loss = batch_shaping_loss(x, Product())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, batch_shaping_loss(x, Uniform()), rtol=1e-6, atol=0)


def test_nan_is_not_hidden():
    x = torch.rand(4, 2)
    x[1, 0] = float('nan')
    assert batch_shaping_loss(x, reduction='none').isnan().tolist() == [True, False]


def test_prior_of_each_gate():
    x = torch.rand(16, 3)
    a = nn.Parameter(torch.tensor([0.3, 0.6, 2.]))
    loss = batch_shaping_loss(x, Beta(a, 0.4), 'none')
    expected = [batch_shaping_loss(x[:, i:i + 1], Beta(a[i].item(), 0.4)).item() for i in range(3)]
    assert loss.tolist() == pytest.approx(expected, rel=1e-4)
    assert (torch.autograd.grad(loss.sum(), a)[0] != 0).all()


@pytest.mark.parametrize('reduction', REDUCTIONS)
def test_l0_by_hand(reduction):
    logits = torch.tensor([[0., 3.], [math.log(3), -3.]], requires_grad=True)
    loss = l0_loss(logits, reduction)
    per_gate = torch.tensor([(0.5 + 0.75) / 2, 0.5])
    torch.testing.assert_close(loss, reduce(per_gate, reduction))
    loss.sum().backward()
    expected = torch.tensor([0.25, 0.75 * 0.25]) / 2 / (2 if reduction == 'mean' else 1)
    torch.testing.assert_close(logits.grad[:, 0], expected)


@pytest.mark.parametrize('reduction', REDUCTIONS)
def test_modules_are_the_functions(reduction):
    x = torch.rand(8, 3)
    loss_fn = BatchShapingLoss({'type': 'beta', 'a': 2., 'b': 3.}, reduction)
    torch.testing.assert_close(loss_fn(x), batch_shaping_loss(x, Beta(2., 3.), reduction), rtol=0, atol=0)
    torch.testing.assert_close(L0Loss(reduction)(x), l0_loss(x, reduction), rtol=0, atol=0)
    assert 'Beta(a=2, b=3)' in repr(loss_fn) and f'reduction={reduction}' in repr(loss_fn)
    assert repr(L0Loss(reduction)) == f'L0Loss(reduction={reduction})'


def test_defaults_are_the_papers():
    x = torch.rand(8, 3)
    assert batch_shaping_loss(x) == BatchShapingLoss()(x) == batch_shaping_loss(x, Beta(0.6, 0.4), 'sum')
    assert l0_loss(x) == L0Loss()(x) == l0_loss(x, 'mean')


@pytest.mark.parametrize('prior', [Beta(), Beta(learnable=True)], ids=str)
def test_compiles_to_one_graph(prior):
    torch._dynamo.reset()
    torch.manual_seed(0)
    loss_fn = BatchShapingLoss(prior)
    x = torch.rand(32, 5).requires_grad_()
    inputs = [x, *prior.parameters()]
    backend = 'inductor' if shutil.which('g++') and not prior.state_dict() else 'aot_eager'
    eager, compiled = (fn(x) for fn in (loss_fn, torch.compile(loss_fn, fullgraph=True, backend=backend)))
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    for actual, expected in zip(
            torch.autograd.grad(compiled, inputs), torch.autograd.grad(eager, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('shape', [(4,), (4, 3, 2), (0, 3), (3, 0)])
def test_bad_shapes(shape):
    for fn, name in ((batch_shaping_loss, 'x'), (l0_loss, 'logits')):
        with pytest.raises(ValueError, match=rf'{name} must be \[N, gates\].*got \[{", ".join(map(str, shape))}\]'):
            fn(torch.zeros(shape))


def test_bad_reductions():
    x = torch.rand(2, 2)
    for fail in (
            lambda: batch_shaping_loss(x, reduction='max'),
            lambda: l0_loss(x, reduction='max'),
            lambda: BatchShapingLoss(reduction='max'),
            lambda: L0Loss(reduction='max'),
    ):
        with pytest.raises(ValueError, match=r"one of \['none', 'sum', 'mean'\], got 'max'"):
            fail()
    with pytest.raises(ValueError, match=r"one of \['sum', 'mean'\], got 'none'"):
        check_reduction('none', ('sum', 'mean'))
    assert check_reduction('sum') == 'sum'


def test_bad_prior():
    with pytest.raises(ValueError, match="got 'gamma'"):
        batch_shaping_loss(torch.rand(2, 2), 'gamma')
