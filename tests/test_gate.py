"""Tests of the channel gate, of the blocks it switches, and of forcing it."""
import copy
import io
import math
import pickle

import pytest
import timm
import torch
import torch.nn as nn
from nets import gate_loss, shuffle

from timm_gated import ChannelGate, GatedBasicBlock, GatedBottleneck, force_gates, gates
from timm_gated.gate import apply_gate, binary_concrete, set_gate_noise

TAU = 2 / 3


def make_gate(in_channels: int = 8, num_gates: int = 12, **kwargs) -> ChannelGate:
    torch.manual_seed(0)
    return shuffle(ChannelGate(in_channels, num_gates, **kwargs))


def make_block(kind: str, inplanes: int = 16, planes: int = 8, stride: int = 1, **kwargs) -> nn.Module:
    """A small gated block with a shortcut of its own where it needs one."""
    torch.manual_seed(0)
    block = {'basic': GatedBasicBlock, 'bottleneck': GatedBottleneck}[kind]
    out_channels = planes * block.expansion
    downsample = None
    if stride != 1 or inplanes != out_channels:
        downsample = nn.Sequential(nn.Conv2d(inplanes, out_channels, 1, stride, bias=False))
    return block(inplanes, planes, stride, downsample, **kwargs)


def is_binary(mask: torch.Tensor) -> bool:
    return set(mask.unique().tolist()) == {0., 1.}


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
    sure = noisy.abs() > 1e-4  # by hand the noise is rounded otherwise
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
    # the ends of what rand_like may return
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
    twin = copy.deepcopy(gate)
    twin(x.float())
    with torch.autocast('cpu', dtype=dtype):
        assert nn.functional.linear(x, gate.fc1.weight).dtype == dtype  # autocast is at work
        mask = gate(x)
    assert gate.logits.dtype == torch.float32
    torch.testing.assert_close(gate.logits, twin.logits)
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
        # (batch normalisation takes the mean away, and with it the gradient of the bias before it)
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
    twin = copy.deepcopy(trained)
    assert gates(trained)[0][1].logits.requires_grad  # the original keeps its state
    assert_same_model(trained, twin)


def test_pickle_after_a_training_step(trained):
    assert_same_model(trained, pickle.loads(pickle.dumps(trained)))


def test_torch_save_of_a_whole_model_after_a_training_step(trained):
    file = io.BytesIO()
    torch.save(trained, file)
    file.seek(0)
    assert_same_model(trained, torch.load(file, weights_only=False))


def test_state_dict_after_a_training_step(trained):
    twin = timm.create_model('gated_resnet20', num_classes=4)
    assert list(trained.state_dict()) == list(twin.state_dict())
    twin.load_state_dict(trained.state_dict())
    assert_same_model(trained, twin)


# The blocks


@pytest.mark.parametrize('kind, stride', [('basic', 1), ('basic', 2), ('bottleneck', 1), ('bottleneck', 2)])
def test_gate_reads_the_pooled_input_of_its_block(kind, stride):
    block = shuffle(make_block(kind, stride=stride)).eval()
    x = torch.randn(4, 16, 7, 5)
    block(x)
    for name, gate in gates(block):
        logits = gate.logits
        gate(x.mean((2, 3)))
        torch.testing.assert_close(logits, gate.logits)
        assert gate.fc1.in_features == 16 and gate.num_gates == 8, name


def test_apply_gate_switches_whole_channels():
    x, mask = torch.randn(2, 3, 4, 5), torch.tensor([[1., 0., 1.], [0., 0., 1.]])
    out = apply_gate(x, mask)
    for n in range(2):
        for c in range(3):
            assert torch.equal(out[n, c], x[n, c] if mask[n, c] else torch.zeros(4, 5))
    assert apply_gate(x.bfloat16(), mask).dtype == torch.bfloat16


@pytest.mark.parametrize('kind, stride', [('basic', 1), ('basic', 2), ('bottleneck', 1), ('bottleneck', 2)])
def test_closed_block_is_its_shortcut(kind, stride):
    planes = 16 if kind == 'basic' else 4
    block = make_block(kind, planes=planes, stride=stride).eval()  # fresh norms map zero to zero
    x = torch.randn(3, 16, 8, 8)
    with force_gates(block, 'closed'), torch.no_grad():
        out = block(x)
    shortcut = x if stride == 1 else block.downsample(x)
    assert torch.equal(out, torch.relu(shortcut))
    with force_gates(block, 'open'), torch.no_grad():
        assert not torch.allclose(block(x), out)


@pytest.mark.parametrize('kind', ['basic', 'bottleneck'])
def test_block_by_hand(kind):
    block = shuffle(make_block(kind, planes=4 if kind == 'bottleneck' else 16)).eval()
    x = torch.randn(3, 16, 6, 6)
    out = block(x)
    masks = [gate.decision[:, :, None, None] for _, gate in gates(block)]
    assert all(is_binary(mask) for mask in masks)
    inner = torch.relu(block.bn1(block.conv1(x))) * masks[0]
    if kind == 'basic':
        inner = block.bn2(block.conv2(inner))
    else:
        inner = block.bn3(block.conv3(torch.relu(block.bn2(block.conv2(inner))) * masks[1]))
    torch.testing.assert_close(out, torch.relu(inner + x))


@pytest.mark.parametrize('kind', ['basic', 'bottleneck'])
def test_closed_filters_get_no_gradient(kind):
    block = shuffle(make_block(kind, planes=4 if kind == 'bottleneck' else 16)).train()
    num_filters = block.conv1.out_channels
    masks = {name: torch.arange(num_filters) % 2 for name, _ in gates(block)}
    with force_gates(block, masks):
        block(torch.randn(4, 16, 6, 6)).pow(2).sum().backward()
    inner = [(block.conv1, block.bn1), (block.conv2, block.bn2)][:len(masks)]
    for conv, bn in inner:
        for grad in (conv.weight.grad, bn.weight.grad, bn.bias.grad):
            per_filter = grad.flatten(1).abs().sum(1) if grad.ndim > 1 else grad.abs()
            assert not per_filter[0::2].any(), 'closed'
            assert per_filter[1::2].all(), 'open'


@pytest.mark.parametrize('kind', ['basic', 'bottleneck'])
def test_mask_is_applied_after_the_relu(kind):
    """Before it, a closed gate would get no gradient, because ReLU passes none at zero."""
    block = make_block(kind, planes=4 if kind == 'bottleneck' else 16).train()
    out = block(torch.randn(32, 16, 6, 6))
    kept = [gate.logits for _, gate in gates(block)]
    for logits in kept:
        logits.retain_grad()
    out.pow(2).sum().backward()
    for (_, gate), logits in zip(gates(block), kept, strict=True):
        closed = gate.decision == 0
        assert closed.any()
        assert logits.grad[closed].ne(0).float().mean() > 0.9


@pytest.mark.parametrize('gated_maps', [(1,), (2,), (1, 2), [2, 1]])
def test_gated_maps_of_a_bottleneck(gated_maps):
    block = make_block('bottleneck', gated_maps=gated_maps)
    assert [name for name, _ in gates(block)] == [f'gate{i}' for i in sorted(gated_maps)]
    assert block(torch.randn(2, 16, 6, 6)).shape == (2, 32, 6, 6)


@pytest.mark.parametrize('gated_maps', [(), (-1,), (4,), (1, 1), 'both'])
def test_other_gated_maps_are_refused(gated_maps):
    with pytest.raises(ValueError, match=r'gated_maps .* one or more of \(0, 1, 2, 3\), got'):
        make_block('bottleneck', gated_maps=gated_maps)


def test_grouped_bottleneck_is_refused():
    with pytest.raises(ValueError, match='cardinality.*4'):
        make_block('bottleneck', cardinality=4, base_width=64)


# Names


@pytest.mark.parametrize('name, gates_in_block, layers', [
    ('gated_resnet18', ['gate1'], (2, 2, 2, 2)),
    ('gated_resnet50', ['gate1', 'gate2'], (3, 4, 6, 3)),
    ('gated_resnet20', ['gate1'], (3, 3, 3)),
])
def test_names_of_the_gates(name, gates_in_block, layers):
    model = timm.create_model(name)
    named = gates(model)
    assert [n for n, _ in named] == [
        f'layer{stage}.{block}.{gate}'
        for stage, num_blocks in enumerate(layers, start=1) for block in range(num_blocks) for gate in gates_in_block]
    for n, gate in named:
        assert gate is model.get_submodule(n)
        assert gate.fc2.bias is not None and isinstance(gate.bn, nn.BatchNorm1d)


def test_number_of_gates():
    assert sum(gate.num_gates for _, gate in gates(timm.create_model('gated_resnet34', device='meta'))) == 3776


def test_no_gates_in_a_dense_model():
    assert gates(timm.create_model('cifar_resnet20')) == []


# Forcing


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1), num_classes=4))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('word, value', [('open', 1.), ('closed', 0.)])
def test_force_all(net, x, word, value, training):
    net.train(training)
    with force_gates(net, word) as model:
        assert model is net
        net(x)
        assert all((gate.decision == value).all() for _, gate in gates(net))
        assert all(gate.logits.requires_grad for _, gate in gates(net))
    net(x)
    assert is_binary(torch.cat([gate.decision for _, gate in gates(net)], 1))


@pytest.mark.parametrize('convert', [
    torch.Tensor.float, torch.Tensor.bool, torch.Tensor.long, torch.Tensor.double, torch.Tensor.numpy,
    torch.Tensor.tolist], ids=lambda f: f.__name__)
@pytest.mark.parametrize('shape', [(32,), (1, 32), (3, 32)])
def test_force_masks(net, x, shape, convert):
    mask = torch.randint(2, shape, generator=torch.Generator().manual_seed(2))
    with force_gates(net, {'layer2.0.gate1': convert(mask)}):
        net(x)
    assert torch.equal(net.layer2[0].gate1.decision, mask.float().expand(3, 32))


def test_masks_switch_the_map(net, x):
    """A mask per image: each image as if alone with its own mask."""
    net.eval()
    masks = {name: torch.randint(2, (3, gate.num_gates)) for name, gate in gates(net)}
    with force_gates(net, masks):
        together = net(x)
    for n in range(3):
        with force_gates(net, {name: mask[n] for name, mask in masks.items()}):
            torch.testing.assert_close(net(x[n:n + 1]), together[n:n + 1])


def test_partial_mapping_leaves_the_other_gates_free(net, x):
    net.eval()
    net(x)
    free = net.layer1[0].gate1.decision
    with force_gates(net, {'layer2.0.gate1': torch.zeros(32)}):
        net(x)
        assert torch.equal(net.layer1[0].gate1.decision, free)
        assert not net.layer2[0].gate1.decision.any()
    with force_gates(net, {}):
        net(x)
        assert torch.equal(net.layer1[0].gate1.decision, free)


@pytest.mark.parametrize('masks, message', [
    ('half', "'open', 'closed'.*'half'"),
    (torch.ones(16), "'open', 'closed'.*Tensor"),
    (None, "'open', 'closed'.*NoneType"),
    ({'layer9.0.gate1': torch.ones(16)}, "no gate 'layer9.0.gate1'.*layer1.0.gate1, layer2.0.gate1, layer3.0.gate1"),
    ({'layer1.0.gate1': torch.ones(17)}, r"'layer1.0.gate1' has shape \(17,\).*\(16,\).*\(N, 16\)"),
    ({'layer1.0.gate1': torch.ones(2, 17)}, r'shape \(2, 17\)'),
    ({'layer1.0.gate1': torch.ones(16, 1)}, r'shape \(16, 1\)'),
    ({'layer1.0.gate1': torch.ones(2, 16, 1, 1)}, r'shape \(2, 16, 1, 1\)'),
    ({'layer1.0.gate1': 1}, r'shape \(\)'),
    ({'layer1.0.gate1': torch.full((16,), 0.5)}, "'layer1.0.gate1'.*0 and 1"),
    ({'layer1.0.gate1': torch.full((16,), 2)}, '0 and 1'),
    ({'layer1.0.gate1': torch.full((16,), -1)}, '0 and 1'),
    ({'layer1.0.gate1': torch.full((16,), math.nan)}, '0 and 1'),
    ({'layer1.0.gate1': torch.ones(16), 'layer2.0.gate1': torch.ones(31)}, "'layer2.0.gate1'"),
])
def test_bad_masks_are_refused_and_change_nothing(net, masks, message):
    with pytest.raises(ValueError, match=message):
        with force_gates(net, masks):
            pytest.fail('the context was entered')
    assert all(gate.forced is None for _, gate in gates(net))


@pytest.mark.parametrize('num_masks', [2, 4])
def test_masks_for_another_batch_are_refused_at_forward(net, x, num_masks):
    with force_gates(net, {'layer1.0.gate1': torch.ones(num_masks, 16)}):
        with pytest.raises(ValueError, match=f'masks for {num_masks} images.*batch has 3'):
            net(x)
    net(x)


def test_gates_are_free_again_after_an_exception(net):
    with pytest.raises(KeyError, match='anything'):
        with force_gates(net, 'closed'):
            raise KeyError('anything')
    assert all(gate.forced is None for _, gate in gates(net))


def test_nested_contexts(net, x):
    net.eval()

    def density() -> list:
        net(x)
        return [gate.decision.mean().item() for _, gate in gates(net)]

    free = density()
    with force_gates(net, 'closed'):
        assert density() == [0, 0, 0]
        with force_gates(net, {'layer2.0.gate1': torch.ones(32)}):
            assert density() == [0, 1, 0]
            with force_gates(net, 'open'):
                assert density() == [1, 1, 1]
            assert density() == [0, 1, 0]
        assert density() == [0, 0, 0]
    assert density() == free


def test_a_changed_mask_tensor_does_not_change_the_forcing(net, x):
    mask = torch.ones(16)
    with force_gates(net, {'layer1.0.gate1': mask}):
        mask.zero_()
        net(x)
    assert net.layer1[0].gate1.decision.all()


def test_forcing_is_no_part_of_the_state_dict(net):
    free = list(net.state_dict())
    with force_gates(net, 'open'):
        assert list(net.state_dict()) == free


def test_forcing_a_model_in_half_precision(x):
    net = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1), dtype=torch.bfloat16)).eval()
    with force_gates(net, {'layer1.0.gate1': torch.arange(16) % 2}):
        assert net(x.bfloat16()).dtype == torch.bfloat16
    assert net.layer1[0].gate1.decision.tolist() == [[0., 1.] * 8] * 3


@pytest.mark.parametrize('masks', ['closed', {}])
def test_a_model_without_gates_cannot_be_forced(masks):
    model = timm.create_model('resnet18')
    with pytest.raises(ValueError, match='ResNet has no gates to force'), force_gates(model, masks):
        pass


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
