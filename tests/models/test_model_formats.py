"""The gated models in other memory formats, precisions and devices, exported and compiled"""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from models import assert_gates_have_gradients, blueprint, create, images
from nets import BLOCKS, GATED, ONE_EACH, SMALL, TINY, gate_loss

from timm_gated import Gate, force_gates, gates

# Formats and precisions


@pytest.mark.parametrize('name', SMALL)
def test_channels_last(name):
    model = create(name, num_classes=4, **TINY[name]).eval()
    x = images(64)
    with torch.no_grad():
        expected = model(x)
        out = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', SMALL)
def test_channels_last_is_kept_through_the_blocks(name):
    model = create(name, **TINY[name]).train().to(memory_format=torch.channels_last)
    features = model.forward_features(images(64).to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', SMALL)
def test_autocast(name, dtype):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, zero_init_last=False, **TINY[name]).train()
    with torch.autocast('cpu', dtype=dtype):
        out = model(images())
        loss = nn.functional.cross_entropy(out, torch.tensor([1, 3]))
    assert out.dtype == dtype and out.isfinite().all()
    assert all(gate.logits.dtype == torch.float32 for _, gate in gates(model))
    (loss + gate_loss(model)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_gates_have_gradients(model)
    with torch.autocast('cpu', dtype=dtype), torch.no_grad():
        assert model.eval()(images()).isfinite().all()


@pytest.mark.parametrize('name', SMALL)
def test_bfloat16_model(name):
    model = timm.create_model(name, num_classes=4, dtype=torch.bfloat16, **TINY[name])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    out = model.train()(images().bfloat16())
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    (out.float().mean() + gate_loss(model)).backward()
    assert_gates_have_gradients(model)
    assert model.eval()(images().bfloat16()).isfinite().all()


def test_float64_model():
    model = create('gated_resnet20', dtype=torch.float64).train()
    assert model(images().double()).dtype == torch.float64
    assert all(gate.logits.dtype == torch.float64 for _, gate in gates(model))


@pytest.mark.parametrize('name', GATED)
def test_meta_device(name):
    model = blueprint(name)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {'meta'}


@pytest.mark.parametrize('name', SMALL)
def test_forward_on_the_meta_device(name):
    model = timm.create_model(name, num_classes=7, in_chans=1, device='meta', **TINY[name]).eval()
    assert model(images(in_chans=1).to('meta')).shape == (2, 7)


@pytest.mark.parametrize('name', SMALL)
def test_meta_device_by_context(name):
    with torch.device('meta'):
        model = timm.create_model(name, drop_path_rate=0.1)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {'meta'}


# Export and compilation


@pytest.mark.parametrize('name', BLOCKS)
def test_export_with_a_dynamic_batch(name):
    model = create(name, num_classes=4, **TINY[name]).eval()
    batch = torch.export.Dim('batch', min=1, max=64)
    exported = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},))
    assert set(exported.state_dict) == set(model.state_dict())
    module = exported.module()
    for size in (1, 2, 5):
        x = images(batch=size)
        torch.testing.assert_close(module(x), model(x), rtol=1e-5, atol=1e-5)


def test_export_with_forced_gates():
    model = create('gated_resnet20', num_classes=4, **TINY['gated_resnet20']).eval()
    masks = {name: torch.arange(gate.num_gates) % 3 == 0 for name, gate in gates(model)}
    with force_gates(model, masks):
        exported = torch.export.export(model, (images(),)).module()
        expected = model(images())
    torch.testing.assert_close(exported(images()), expected, rtol=1e-5, atol=1e-5)


def test_export_leaves_the_model_usable():
    model = create('gated_resnet20', num_classes=4, **TINY['gated_resnet20']).eval()
    torch.export.export(model, (images(),))
    copy.deepcopy(model)
    (model.train()(images()).sum() + gate_loss(model)).backward()
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('name', ['convnet_aig_resnet50', 'gated_resnet50', 'skipnet_resnet50'])
def test_compile(name):
    """ImageNet networks compile to one graph. test_compiled_training.py has the other networks."""
    torch._dynamo.reset()
    model = create(name, num_classes=4, **TINY[name]).eval()
    compiled = torch.compile(model, backend='eager', fullgraph=True)
    x = images(batch=4)
    with torch.no_grad():
        expected = model(x)
        decisions = [gate.decision for _, gate in gates(model)]
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    for (_, gate), decision in zip(gates(model), decisions, strict=True):
        assert torch.equal(gate.decision, decision)

    model.train()
    out = compiled(x)
    assert {v for _, gate in gates(model) for v in gate.decision.unique().tolist()} == {0., 1.}
    assert all(gate.logits.requires_grad for _, gate in gates(model))
    (out.pow(2).mean() + gate_loss(model)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_gates_have_gradients(model)
    first = [gate.decision for _, gate in gates(model)]
    compiled(x)
    same = all(torch.equal(a, gate.decision) for a, (_, gate) in zip(first, gates(model), strict=True))
    noiseless = all(torch.equal(*(gate.sample(gate.logits) for _ in range(2))) for _, gate in gates(model))
    assert same == noiseless  # noisy gates draw new noise


def test_forcing_a_compiled_model():
    torch._dynamo.reset()
    model = create('gated_resnet20', num_classes=4, layers=(1, 1), channels=(8, 8)).eval()
    compiled = torch.compile(model, backend='eager')
    x = images()
    with torch.no_grad():
        free = compiled(x)
        for masks in ('open', 'closed'):
            with force_gates(compiled, masks):
                out = compiled(x)
            with force_gates(model, masks):
                torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-4)
            assert not torch.allclose(out, free)
        torch.testing.assert_close(compiled(x), free)


@pytest.mark.parametrize('name', ONE_EACH)
def test_no_gate_is_traced_by_fx(name):
    """The gates of an fx feature extractor still decide per image."""
    model = create(name, features_only=True, feature_cls='fx', out_indices=(3,), **TINY[name]).eval()
    model(images())
    assert all(isinstance(gate, Gate) and gate.logits.shape[0] == 2 for _, gate in gates(model))
    with force_gates(model, 'closed'):
        closed = model(images())[0]
    assert not torch.allclose(closed, model(images())[0])
