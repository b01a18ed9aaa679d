"""Priors: values against SciPy, gradients, learnable parameters, and invalid arguments"""
import copy
import math
import pickle

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, priors, quantiles, simple_priors

from timm_gated.loss.gate_losses import batch_shaping_loss, l0_loss
from timm_gated.loss.priors import Beta, Mixture, Normal, Prior, RelaxedBernoulli, Uniform, create_prior

UNIT = torch.tensor([0., 1e-30, 1e-6, 0.1, 0.3, 0.5, 0.8, 1 - 2 ** -24, 1.])
REAL = torch.tensor([-50., -3., -1., 0., 0.4, 2., 5.])
ALL = [Beta, Uniform, Normal, RelaxedBernoulli]
INSTANCES = [Beta(), Uniform(), Normal(), RelaxedBernoulli(), Mixture('beta', 'uniform')]


def relaxed_bernoulli_cdf(x: np.ndarray, temperature: float, probs: float) -> np.ndarray:
    """By the definition of the relaxed sample, sigmoid((logit + logistic noise) / temperature)."""
    with np.errstate(divide='ignore'):
        return scipy.stats.logistic.cdf(temperature * scipy.special.logit(x) - scipy.special.logit(probs))


@pytest.mark.parametrize('prior, cdf', [
    (Beta(), scipy.stats.beta(0.6, 0.4).cdf),
    (Beta(2, 3.5), scipy.stats.beta(2, 3.5).cdf),
    (Uniform(), scipy.stats.uniform().cdf),
    (Uniform(-2, 3), scipy.stats.uniform(-2, 5).cdf),
    (Normal(), scipy.stats.norm().cdf),
    (Normal(0.5, 2), scipy.stats.norm(0.5, 2).cdf),
    (RelaxedBernoulli(), lambda x: relaxed_bernoulli_cdf(x, 2 / 3, 0.6)),
    (RelaxedBernoulli(0.2, probs=0.9), lambda x: relaxed_bernoulli_cdf(x, 0.2, 0.9)),
    (RelaxedBernoulli(2, logits=-1.), lambda x: relaxed_bernoulli_cdf(x, 2, 1 / (1 + math.e))),
], ids=lambda value: str(value) if isinstance(value, Prior) else 'reference')
def test_cdf(prior, cdf):
    x = UNIT if isinstance(prior, (Beta, RelaxedBernoulli)) else REAL
    np.testing.assert_allclose(prior.cdf(x).numpy(), cdf(x.double().numpy()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prior(x), prior.cdf(x), rtol=0, atol=0)


@pytest.mark.parametrize('prior', [
    Beta(), Beta(3., 0.2), Uniform(-1., 2.), Normal(0.5, 0.2), RelaxedBernoulli(), RelaxedBernoulli(2., logits=-1.),
], ids=str)
def test_pdf_is_the_gradient_of_the_cdf(prior):
    x = torch.cat([torch.linspace(0.01, 0.99, 50), torch.tensor([0., 1e-30, 1 - 2 ** -24, 1.])]).requires_grad_()
    grad, = torch.autograd.grad(prior.cdf(x).sum(), x)
    assert grad.isfinite().all() and (grad >= 0).all()
    torch.testing.assert_close(grad, prior.pdf(x.detach()), rtol=1e-4, atol=1e-6)
    x = torch.linspace(0.05, 0.95, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(prior.cdf, x)


def test_uniform_has_a_gradient_at_both_ends_and_none_outside():
    x = torch.tensor([-1., 2., -1.1, 2.1], requires_grad=True)
    prior = Uniform(-1., 2.)
    cdf = prior.cdf(x)
    assert cdf.tolist() == [0, 1, 0, 1]
    torch.testing.assert_close(torch.autograd.grad(cdf.sum(), x)[0], torch.tensor([1 / 3, 1 / 3, 0, 0]))
    torch.testing.assert_close(prior.pdf(x.detach()), torch.tensor([1 / 3, 1 / 3, 0, 0]))


def test_relaxed_bernoulli_at_the_ends():
    prior = RelaxedBernoulli(0.1)  # the density is infinite at both ends
    x = torch.tensor([0., 1., -1., 2.], requires_grad=True)
    cdf = prior.cdf(x)
    assert cdf.tolist() == [0, 1, 0, 1]
    grad, = torch.autograd.grad(cdf.sum(), x)
    assert grad.isfinite().all() and (grad[:2] > 1).all() and (grad[2:] == 0).all()
    assert prior.pdf(x)[2:].tolist() == [0, 0]
    assert RelaxedBernoulli(0.01).pdf(torch.tensor(1e-45)).isfinite()
    samples = torch.distributions.RelaxedBernoulli(torch.tensor(0.5), torch.tensor(0.3))
    torch.testing.assert_close(  # torch has the density, not the CDF
        RelaxedBernoulli(0.5, probs=0.3).pdf(UNIT[3:7]), samples.log_prob(UNIT[3:7]).exp(), rtol=1e-4, atol=0)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('cls', ALL)
@pytest.mark.parametrize('learnable', [False, True])
def test_half_precision(cls, dtype, learnable):
    prior = cls(learnable=learnable)
    bits = torch.arange(0, 2 ** 15, 37, dtype=torch.int16)
    x = torch.cat([bits.view(dtype), torch.tensor([0., 1.]).to(dtype)])
    x = x[(x >= 0) & (x <= 1)].requires_grad_()
    cdf = prior.cdf(x)
    assert cdf.dtype == dtype and prior.pdf(x).dtype == dtype
    torch.testing.assert_close(
        cdf.float(), prior.cdf(x.detach().float()).detach(), rtol=torch.finfo(dtype).eps, atol=1e-7)
    cdf.sum().backward()
    assert x.grad.dtype == dtype and x.grad.isfinite().all()
    assert prior.pdf(x).isfinite().all()


@examples(100)
@given(prior=priors(), x=st.lists(st.just(1e-45) | st.floats(0, 1) | st.floats(-10, 10), min_size=2, max_size=20))
def test_cdfs_are_monotone_probabilities(prior, x):
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        cdf = prior.cdf(torch.tensor(x, dtype=dtype).sort().values)
        assert ((cdf >= 0) & (cdf <= 1)).all()
        assert (cdf.diff() >= -tolerance).all()
    x = torch.tensor(x, requires_grad=True)
    for density in (prior.pdf(x), torch.autograd.grad(prior.cdf(x).sum(), x)[0]):
        assert (density >= 0).all() and density.isfinite().all()


def scipy_quantiles(prior: Prior, p: np.ndarray) -> np.ndarray:
    if isinstance(prior, Beta):
        return scipy.special.betaincinv(prior.a, prior.b, p)
    if isinstance(prior, Uniform):
        return scipy.stats.uniform.ppf(p, prior.low, prior.high - prior.low)
    if isinstance(prior, Normal):
        return scipy.stats.norm.ppf(p, prior.loc, prior.scale)
    return scipy.special.expit((scipy.special.logit(p) + prior.logits) / prior.temperature)


def assert_inverse(prior: Prior, quantiles: torch.Tensor, p: torch.Tensor, tolerance: float) -> None:
    """A quantile's neighbours among the numbers of its dtype lie to both sides of its probability."""
    below, above = (prior.cdf(torch.nextafter(quantiles, torch.full_like(quantiles, end))) for end in (-99., 99.))
    assert (below <= p + tolerance).all() and (above >= p - tolerance).all()


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-11), (torch.float32, 2e-6)])
@examples(100)
@given(prior=simple_priors(), p=st.lists(st.sampled_from([0., 1.]) | st.floats(1e-100, 1), min_size=1, max_size=10))
def test_cdfs_undo_scipys_quantiles(dtype, tolerance, prior, p):
    p = torch.tensor(p, dtype=torch.float64)
    quantiles = torch.from_numpy(scipy_quantiles(prior, p.numpy())).to(dtype).clamp(-99, 99)
    assert_inverse(prior, quantiles, p, tolerance)


@examples(50)
@given(prior=priors(least=0.4), p=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=10))
def test_cdfs_undo_their_own_quantiles(prior, p):
    p = torch.tensor(p, dtype=torch.float64)
    x = quantiles(prior, p)
    to_the_next = torch.nextafter(x, torch.full_like(x, 99)) - x
    assert ((prior.cdf(x) - p).abs() <= 2 * prior.pdf(x) * to_the_next + 1e-14).all()


@pytest.mark.parametrize('cls, names', [
    (Beta, {'log_a', 'log_b'}),
    (Uniform, {'low', 'log_width'}),
    (Normal, {'loc', 'log_scale'}),
    (RelaxedBernoulli, {'log_temperature', 'logits'}),
])
def test_learnable(cls, names):
    fixed, prior = cls(), cls(learnable=True)
    assert not list(fixed.parameters()) and not fixed.state_dict()
    assert {name for name, _ in prior.named_parameters()} == names
    x = torch.linspace(0.1, 0.9, 9)
    torch.testing.assert_close(prior.cdf(x), fixed.cdf(x), rtol=1e-5, atol=1e-6)
    prior = prior.double()
    x = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *_: prior.cdf(x), tuple(prior.parameters()))
    ends = prior.cdf(torch.tensor([0., 1.], dtype=torch.float64)).sum()
    assert all(grad.isfinite() for grad in torch.autograd.grad(ends, list(prior.parameters())))
    # Positive parameters stay positive after any update.
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter -= 3
    assert prior.cdf(x).isfinite().all() and (prior.pdf(x) >= 0).all()


def test_learning_recovers_a_distribution():
    torch.manual_seed(0)
    x = torch.distributions.Beta(2., 5.).sample((2000,)).double()
    prior = Beta(1., 1., learnable=True).double()
    optimizer = torch.optim.LBFGS(prior.parameters(), max_iter=40)
    targets = torch.arange(1, 2001, dtype=torch.float64) / 2001

    def closure():
        optimizer.zero_grad()
        loss = (targets - prior.cdf(x.sort().values)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert prior.a.item() == pytest.approx(2, rel=0.1) and prior.b.item() == pytest.approx(5, rel=0.1)


@pytest.mark.parametrize('cls, name', [
    (Beta, 'a'), (Beta, 'b'), (Uniform, 'high'), (Normal, 'loc'), (Normal, 'scale'), (RelaxedBernoulli, 'temperature'),
    (RelaxedBernoulli, 'probs'), (RelaxedBernoulli, 'logits')])
def test_parameter_and_buffer(cls, name):
    x = torch.rand(4, 3)
    expected = cls(**{name: 0.7}).cdf(x)
    parameter = nn.Parameter(torch.tensor([0.7, 0.7, 0.7]))  # one number per gate
    for learnable in (False, True):
        prior = cls(**{name: parameter}, learnable=learnable)
        assert dict(prior.named_parameters())[name] is parameter
        cdf = prior.cdf(x)
        torch.testing.assert_close(cdf, expected, rtol=1e-5, atol=1e-6)
        grad, = torch.autograd.grad(cdf.sum(), parameter)
        assert grad.shape == (3,) and (grad != 0).all()
    prior = cls(**{name: parameter.detach()})
    assert not list(prior.parameters()) and len(prior.state_dict()) == 1
    torch.testing.assert_close(prior.cdf(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('cls', ALL)
def test_copies_and_checkpoints(cls):
    x = torch.rand(5)
    prior = cls(learnable=True)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter += 0.1
    restored = cls(learnable=True)
    restored.load_state_dict(prior.state_dict())
    for other in (copy.deepcopy(prior), pickle.loads(pickle.dumps(prior)), restored):
        torch.testing.assert_close(other.cdf(x), prior.cdf(x), rtol=0, atol=0)
    assert not torch.equal(prior.cdf(x), cls().cdf(x))


@pytest.mark.parametrize('make, message', [
    (lambda: Beta(a=0.), 'a must be positive and finite, got 0.0'),
    (lambda: Beta(b=-1.), 'b must be positive and finite, got -1.0'),
    (lambda: Beta(a=math.nan), 'a must be positive and finite, got nan'),
    (lambda: Beta(a=torch.tensor([1., 0.])), r'a must be positive and finite, got \[1.0, 0.0\]'),
    (lambda: Beta(a='0.6'), "a must be positive and finite, got '0.6'"),
    (lambda: Beta(a=True), 'a must be positive and finite, got True'),
    (lambda: Beta(b=math.inf, learnable=True), 'b must be positive and finite, got inf'),
    (lambda: Beta(a=torch.tensor(True)), 'a must be positive and finite, got True'),
    (lambda: Beta(1e30, 1e30), r'a must be between 1e-30 and 1000, got 1e\+30'),
    (lambda: Beta(1., 1e-31), 'b must be between 1e-30 and 1000, got 1e-31'),
    (lambda: Beta(a=torch.tensor([1., 1e4]), learnable=True), 'a must be between 1e-30 and 1000, got'),
    (lambda: Normal(scale=1e-300), r'scale must be between 1e-30 and 1e\+30, got 1e-300'),
    (lambda: Normal(loc=1e300), r'loc must be between -1e30 and 1e30, got 1e\+300'),
    (lambda: Uniform(0., 1e-300), r'high - low must be between 1e-30 and 1e\+30, got 1e-300'),
    (lambda: Uniform(torch.tensor(False), torch.tensor(True)), 'low must be finite, got False'),
    (lambda: RelaxedBernoulli(1e300), r'temperature must be between 1e-30 and 1e\+30, got 1e\+300'),
    (lambda: Normal(scale=0.), 'scale must be positive and finite, got 0.0'),
    (lambda: Normal(loc=math.nan), 'loc must be finite, got nan'),
    (lambda: Uniform(1., 1.), 'high must be finite and above low=1.0, got 1.0'),
    (lambda: Uniform(high=math.nan), 'high must be finite and above low=0.0, got nan'),
    (lambda: RelaxedBernoulli(temperature=-1), 'temperature must be positive and finite, got -1'),
    (lambda: RelaxedBernoulli(probs=0), r'probs must be inside \(0, 1\), got 0'),
    (lambda: RelaxedBernoulli(probs=1.), r'probs must be inside \(0, 1\), got 1.0'),
    (lambda: RelaxedBernoulli(logits=math.inf), 'logits must be finite, got inf'),
    (lambda: RelaxedBernoulli(probs=0.5, logits=0.), 'only one of probs and logits can be given, got probs=0.5'),
])
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('learnable', [False, True])
@pytest.mark.parametrize('cls, kwargs', [
    (Beta, dict(a=1e-30, b=1.)), (Beta, dict(a=1e-30, b=1e-30)), (Beta, dict(a=1000., b=1e-30)),
    (Uniform, dict(high=1e-30)), (Uniform, dict(low=-4e29, high=4e29)), (Normal, dict(loc=1e30, scale=1e-30)),
    (Normal, dict(scale=1e30)), (RelaxedBernoulli, dict(temperature=1e-30, logits=-1e30)),
    (RelaxedBernoulli, dict(temperature=1e30)),
])
def test_extreme_parameters_have_values(cls, kwargs, learnable, dtype):
    x = torch.tensor([-1., 0., 1e-45, 1e-30, 0.3, 0.5, 1., 2.], dtype=dtype, requires_grad=True)
    prior = cls(**kwargs, learnable=learnable)
    cdf = prior.cdf(x)
    grad, = torch.autograd.grad(cdf.sum(), x)
    assert ((cdf >= 0) & (cdf <= 1)).all() and (cdf.diff() >= -1e-6).all()
    assert grad.isfinite().all() and prior.pdf(x).isfinite().all()


@pytest.mark.parametrize('prior', INSTANCES, ids=lambda prior: type(prior).__name__)
@pytest.mark.parametrize('dtype', [torch.bool, torch.int64])
def test_values_that_are_not_floating_are_refused(prior, dtype):
    x = torch.tensor([[0], [1]], dtype=dtype)
    for fn in (prior.cdf, prior.pdf, lambda x: batch_shaping_loss(x, prior), l0_loss):
        with pytest.raises(ValueError, match=f'x must be a floating-point tensor, got {dtype}'):
            fn(x)


@pytest.mark.parametrize('prior', INSTANCES, ids=lambda prior: type(prior).__name__)
def test_function_transforms(prior):
    x = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(prior.cdf))(x), prior.pdf(x))
    for loss in (lambda x: batch_shaping_loss(x[:, None], prior), lambda x: l0_loss(x[:, None])):
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(leaf), leaf)[0])


@pytest.mark.parametrize('spec, expected', [
    ('beta', 'Beta(a=0.6, b=0.4)'),
    ('uniform', 'Uniform(low=0, high=1)'),
    ('normal', 'Normal(loc=0, scale=1)'),
    ('relaxed_bernoulli', 'RelaxedBernoulli(temperature=0.6667, logits=0.4055)'),
    ({'type': 'beta', 'a': 2, 'b': 3}, 'Beta(a=2, b=3)'),
    ({'type': 'uniform', 'low': -1, 'learnable': True}, 'Uniform(low=-1, width=2, learnable)'),
    ({'type': 'normal', 'scale': torch.ones(2, 3)}, 'Normal(loc=0, scale=<2x3>)'),
    ({'type': 'relaxed_bernoulli', 'probs': nn.Parameter(torch.tensor(0.25))},
     'RelaxedBernoulli(temperature=0.6667, probs=0.25, learnable)'),
])
def test_create_prior(spec, expected):
    before = dict(spec) if isinstance(spec, dict) else spec
    assert repr(create_prior(spec)) == expected
    assert spec == before or isinstance(spec, dict) and spec.keys() == before.keys()


def test_create_prior_keeps_a_prior():
    prior = Normal()
    assert create_prior(prior) is prior


@pytest.mark.parametrize('spec, message', [
    ('gamma', "one of .*'beta', 'uniform', 'normal', 'relaxed_bernoulli'.*got 'gamma'"),
    ({'type': 'gamma'}, "one of .*'beta', 'uniform', 'normal', 'relaxed_bernoulli'.*got 'gamma'"),
    ({'a': 1.}, "mapping with a 'type', one of .*'beta'.*got {'a': 1.0}"),
    (None, "mapping with a 'type', one of .*'beta'.*got None"),
    ({'type': 'beta', 'alpha': 1.}, r"arguments of prior 'beta' are \['a', 'b', 'learnable'\], got 'alpha'"),
    ({'type': ['beta']}, r"one of .*'beta'.*got \['beta'\]"),
])
def test_create_prior_refuses(spec, message):
    with pytest.raises(ValueError, match=message):
        create_prior(spec)


def test_base_is_abstract():
    for method in (Prior().cdf, Prior().pdf):
        with pytest.raises(NotImplementedError):
            method(torch.rand(2))
