"""The channel gate"""
import copy
import io
import math
import pickle

import pytest
import timm
import torch
import torch.nn as nn
from nets import gate_loss, is_binary, shuffle

from timm_gated import ChannelGate, gates
from timm_gated.layers.gate import binary_concrete, set_gate_noise

TAU = 2 / 3


def make_gate(in_channels: int = 8, num_gates: int = 12, **kwargs) -> ChannelGate:
    torch.manual_seed(0)
    return shuffle(ChannelGate(in_channels, num_gates, **kwargs))


# The binary concrete sample


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_sample_is_hard_forward_and_relaxed_backward(dtype):
    torch.manual_seed(0)
    logits = (2 * torch.randn(64, 50, dtype=dtype)).requires_grad_()
    upstream = torch.randn_like(logits)

    torch.manual_seed(1)
    sample = binary_concrete(logits)
    sample.backward(upstream)

    torch.manual_seed(1)
    uniform = torch.rand_like(logits).clamp(torch.finfo(dtype).eps, 1 - torch.finfo(dtype).eps)
    noisy = logits.detach() + uniform.log() - (1 - uniform).log()
    soft = 1 / (1 + torch.exp(-noisy / TAU))
    torch.testing.assert_close(logits.grad, upstream * soft * (1 - soft) / TAU, rtol=1e-3, atol=1e-6)
    sure = noisy.abs() > 1e-4  # the noise computed here is rounded differently
    assert sure.float().mean() > 0.99
    assert torch.equal(sample[sure], (noisy > 0).to(dtype)[sure])
    assert is_binary(sample)


@pytest.mark.parametrize('temperature', [0.1, 2 / 3, 1., 5.])
def test_gradient_is_that_of_the_relaxation_at_any_temperature(temperature):
    torch.manual_seed(0)
    logits = torch.randn(200, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    binary_concrete(logits, temperature).sum().backward()
    torch.manual_seed(1)
    noise = torch.logit(torch.rand_like(logits))
    soft_logits = logits.detach().clone().requires_grad_()
    torch.sigmoid((soft_logits + noise) / temperature).sum().backward()
    torch.testing.assert_close(logits.grad, soft_logits.grad)


def test_frequency_of_open_gates_is_the_sigmoid_of_the_logit():
    torch.manual_seed(0)
    logits = torch.tensor([-3., -1., -0.25, 0., 0.405, 1.5, 4.])
    num_samples = 40000
    frequency = binary_concrete(logits.expand(num_samples, -1)).mean(0)
    expected = torch.sigmoid(logits)
    five_sigma = 5 * (expected * (1 - expected) / num_samples).sqrt()
    assert ((frequency - expected).abs() < five_sigma).all(), (frequency, expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extreme_logits_and_noise_give_finite_gradients(dtype, monkeypatch):
    logits = torch.tensor([-1e4, -50., 0., 50., 1e4], dtype=dtype).repeat(2, 1).requires_grad_()
    # smallest and largest values of rand_like
    monkeypatch.setattr(torch, 'rand_like', lambda x: torch.tensor([[0.], [1.]], dtype=x.dtype).expand_as(x))
    sample = binary_concrete(logits)
    sample.sum().backward()
    assert logits.grad.isfinite().all()
    assert is_binary(sample)


# The gate


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_training_mask_is_exactly_binary(dtype):
    gate = make_gate(dtype=dtype).train()
    mask = gate(torch.randn(256, 8, dtype=dtype))
    assert mask.dtype == dtype and mask.shape == (256, 12)
    assert is_binary(mask)
    assert torch.equal(gate.decision, mask)


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_keeps_logits_in_float32_and_masks_binary(dtype, training):
    gate = make_gate().train(training)
    x = torch.randn(256, 8).to(dtype)
    copied = copy.deepcopy(gate)
    copied(x.float())
    with torch.autocast('cpu', dtype=dtype):
        assert nn.functional.linear(x, gate.fc1.weight).dtype == dtype  # autocast is active
        mask = gate(x)
    assert gate.logits.dtype == torch.float32
    torch.testing.assert_close(gate.logits, copied.logits)
    assert is_binary(mask) and is_binary(gate.decision)


@pytest.mark.parametrize('dtype, logits_dtype', [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)])
def test_logits_are_float32_or_better(dtype, logits_dtype):
    gate = make_gate(dtype=dtype).train()
    mask = gate(torch.randn(64, 8, dtype=dtype))
    assert gate.logits.dtype == logits_dtype
    assert is_binary(mask)


def test_logits_by_hand():
    gate = make_gate().eval()
    x = torch.randn(32, 8)
    hidden = x @ gate.fc1.weight.t() + gate.fc1.bias
    hidden = (hidden - gate.bn.running_mean) / (gate.bn.running_var + gate.bn.eps).sqrt()
    hidden = hidden * gate.bn.weight + gate.bn.bias
    logits = hidden.clamp(min=0) @ gate.fc2.weight.t() + gate.fc2.bias
    gate(x)
    assert gate.fc1.out_features == 16
    torch.testing.assert_close(gate.logits, logits)


def test_evaluation_is_the_sign_of_the_logit():
    gate = make_gate().eval()
    x = torch.randn(64, 8)
    mask = gate(x)
    assert is_binary(mask)
    assert torch.equal(mask, (gate.logits > 0).float())
    assert torch.equal(mask, gate(x))


def test_a_logit_of_zero_is_closed_in_evaluation():
    gate = make_gate().eval()
    nn.init.zeros_(gate.fc2.weight)
    nn.init.zeros_(gate.fc2.bias)
    assert not gate(torch.randn(4, 8)).any()


def test_training_samples_anew():
    gate = make_gate().train()
    x = torch.randn(64, 8)
    assert not torch.equal(gate(x), gate(x))


@pytest.mark.parametrize('source', ['mask', 'logits'])
def test_gradient_reaches_all_parameters(source):
    gate = make_gate().train()
    mask = gate(torch.randn(64, 8))
    weight = torch.randn(64, 12)
    ((mask if source == 'mask' else gate.logits) * weight).sum().backward()
    for name, parameter in gate.named_parameters():
        assert parameter.grad.isfinite().all(), name
        # Batch normalisation removes the mean, and with it the gradient of the bias before it.
        assert name == 'fc1.bias' or parameter.grad.abs().max() > 1e-3, name


def test_state_is_overwritten_never_appended():
    gate = make_gate().train()
    gate(torch.randn(5, 8))
    gate(torch.randn(3, 8))
    assert gate.logits.shape == gate.decision.shape == (3, 12)
    assert gate.logits.requires_grad and not gate.decision.requires_grad


def test_initial_bias_is_the_mean_of_the_prior():
    gate = ChannelGate(8, 12)
    torch.testing.assert_close(torch.sigmoid(gate.fc2.bias), torch.full((12,), 0.6), rtol=0, atol=1e-3)
    assert ChannelGate(8, 12, bias=2.5).fc2.bias.tolist() == [2.5] * 12


@pytest.mark.parametrize('kwargs, message', [
    (dict(temperature=0.), 'temperature.*0'),
    (dict(temperature=-1.), 'temperature.*-1'),
    (dict(temperature=math.nan), 'temperature.*nan'),
    (dict(hidden_channels=0), 'hidden_channels.*0'),
])
def test_bad_options_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ChannelGate(8, 12, **kwargs)


# A batch of one


def test_training_batch_of_one_works_and_leaves_the_statistics_alone():
    gate = make_gate().train()
    before = copy.deepcopy(gate.bn.state_dict())
    x = torch.randn(1, 8)
    mask = gate(x)
    logits = gate.logits
    logits.sum().backward()
    assert mask.shape == (1, 12)
    assert all(torch.equal(value, before[name]) for name, value in gate.bn.state_dict().items())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gate.parameters())
    gate.eval()(x)
    torch.testing.assert_close(logits, gate.logits)  # normalised by the running statistics


def test_training_batch_of_two_updates_the_statistics():
    gate = make_gate().train()
    before = copy.deepcopy(gate.bn.state_dict())
    gate(torch.randn(2, 8))
    assert not any(torch.equal(value, before[name]) for name, value in gate.bn.named_buffers())


@pytest.mark.parametrize('name', ['gated_resnet20', 'gated_resnet18', 'gated_resnet50'])
def test_model_trains_on_a_batch_of_one(name):
    model = timm.create_model(name, num_classes=5).train()
    model(torch.randn(1, 3, 64, 64)).sum().backward()
    assert all(gate.logits.shape[0] == 1 for _, gate in gates(model))


# Copies, right after a training step


@pytest.fixture(params=['forward', 'backward'])
def trained(request) -> nn.Module:
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20', num_classes=4)).train()
    loss = model(torch.randn(4, 3, 32, 32)).sum() + gate_loss(model)
    if request.param == 'backward':
        loss.backward()
    return model


def assert_same_model(model: nn.Module, other: nn.Module) -> None:
    x = torch.randn(2, 3, 32, 32)
    assert all(gate.logits is None and gate.decision is None for _, gate in gates(other))
    assert torch.equal(model.eval()(x), other.eval()(x))
    assert all(gate.logits.shape[0] == 2 for _, gate in gates(other))


def test_deepcopy_after_a_training_step(trained):
    copied = copy.deepcopy(trained)
    assert gates(trained)[0][1].logits.requires_grad  # the original keeps its state
    assert_same_model(trained, copied)


def test_pickle_after_a_training_step(trained):
    assert_same_model(trained, pickle.loads(pickle.dumps(trained)))


def test_torch_save_of_a_model_after_a_training_step(trained):
    file = io.BytesIO()
    torch.save(trained, file)
    file.seek(0)
    assert_same_model(trained, torch.load(file, weights_only=False))


def test_state_dict_after_a_training_step(trained):
    copied = timm.create_model('gated_resnet20', num_classes=4)
    assert list(trained.state_dict()) == list(copied.state_dict())
    copied.load_state_dict(trained.state_dict())
    assert_same_model(trained, copied)


# Noise


def test_noise_scales_the_distance_from_the_decision_without_any():
    logits = torch.linspace(-6, 6, 241).expand(4000, -1)
    torch.manual_seed(0)
    for scale in (1., 0.5, 0.1):
        frequency = binary_concrete(logits, noise=scale).mean(0)
        torch.testing.assert_close(frequency, torch.sigmoid(logits[0] / scale), atol=0.05, rtol=0)
    assert torch.equal(binary_concrete(logits, noise=0.), (logits > 0).float())


def test_without_noise_the_gradient_is_that_of_the_sigmoid():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    binary_concrete(logits, temperature=0.5, noise=0.).sum().backward()
    soft = torch.sigmoid(2 * logits.detach())
    torch.testing.assert_close(logits.grad, 2 * soft * (1 - soft))


def test_set_gate_noise_reaches_all_gates_and_stays_out_of_checkpoints():
    model = timm.create_model('gated_resnet20').train()
    keys = set(model.state_dict())
    set_gate_noise(model, 0.)
    images = torch.randn(4, 3, 32, 32)
    model(images)
    for _, gate in gates(model):
        assert torch.equal(gate.mask, gate.decide(gate.logits))
    assert set(model.state_dict()) == keys
    with pytest.raises(ValueError, match='noise.*-1'):
        set_gate_noise(model, -1.)
