"""Quantised networks: the bits of the reference, close to float32, saved and loaded without another calibration"""
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import pytest
import timm
import torch
import torch.nn as nn
from accelerated import images
from int8_reference import run_reference
from nets import shuffle
from saved_networks import SHALLOW, make, segmentor

from mmseg_plugin import GatedResNet
from timm_gated import accelerate, count_macs, force_gates, gates, instruction_sets, load_accelerated
from timm_gated.inference import Accelerated, mixed
from timm_gated.inference.program import ConvOp, Int8ConvOp, Int8LinearOp

ISAS = instruction_sets('int8')
NETWORKS: List[tuple] = [
    ('gated_resnet18', SHALLOW), ('gated_resnet20', {}), ('gated_resnet50', dict(SHALLOW, in_chans=1)),
    ('gated_resnet50', dict(SHALLOW, features_only=True, output_stride=8)), ('convnet_aig_resnet20', {}),
    ('convnet_aig_resnet50', dict(SHALLOW, num_classes=0)), ('dgnet_resnet18', SHALLOW), ('cifar_resnet20', {}),
    ('resnet26d', SHALLOW)]
names = dict(ids=lambda value: '-'.join(map(str, value)) if isinstance(value, dict) else None)


@pytest.fixture(autouse=True)
def all_in_int8(monkeypatch):
    """No layer is faster in float32, so that networks do not depend on the time of day."""
    monkeypatch.setattr(mixed, '_MARGIN', 0.)


@pytest.fixture(autouse=True)
def restore_threads():
    yield
    torch.set_num_threads(1)


def quantised(model: nn.Module, channels: int = 3, **kwargs: Any) -> Any:
    return accelerate(model, precision='int8', calibration=images(4, 48, 48, channels), **kwargs)


def is_float(op: Any) -> bool:
    return isinstance(op, ConvOp) and not isinstance(op, (Int8ConvOp, Int8LinearOp))


def check(model: nn.Module, x: torch.Tensor) -> Accelerated:
    """Outputs, gates and MACs of all instruction sets equal those of the reference, and are close to float32."""
    plain = accelerate(model, 'native')
    fast, *others = (quantised(model, x.shape[1], isa=isa) for isa in ISAS)
    expected = run_reference(fast.runner.program, x)
    assert expected.exact and not any(map(is_float, fast.runner.program.ops))
    for network in (fast, *others):
        num_open = torch.empty(len(x), network.runner.program.num_gates, dtype=torch.int32)
        outputs = network.runner(x, num_open)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected.outputs, strict=True))
        assert torch.equal(num_open, expected.num_open)
    for ours, theirs in zip(fast.runner(x), plain.runner(x), strict=True):
        assert (ours - theirs).norm() < 0.5 * theirs.norm()
    return fast


@pytest.mark.parametrize('name, kwargs', NETWORKS, **names)
def test_networks(name, kwargs):
    check(make(name, **kwargs), images(2, 49, 39, kwargs.get('in_chans', 3)))


def test_dilated_backbones_of_mmseg():
    torch.manual_seed(0)
    model = shuffle(GatedResNet(
        depth=50, base_channels=8, stem_channels=8, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4),
        contract_dilation=True))
    model.eval()
    check(model, images(1, 65, 47))


@pytest.mark.parametrize('masks', ['open', 'closed'])
def test_forced_gates(masks):
    model = make('gated_resnet20')
    with force_gates(model, masks):
        check(model, images(2, 32, 32))


def test_close_to_float32():
    """The error on calibrated images is some per cent, with each kind of range."""
    model = timm.create_model('gated_resnet20.bas_c10', pretrained=True).eval()
    x = images(4, 32, 32)
    expected = accelerate(model, 'native')(x)
    for method in ('percentile', 'mse', 'max'):
        fast = accelerate(model, precision='int8', calibration=x, calibration_range=method)
        assert (fast(x) - expected).norm() < 0.2 * expected.norm(), method


def test_macs_are_those_of_float32():
    """Gates decide alike for a network with forced gates."""
    model, x = make('gated_resnet20'), images(2, 32, 32)
    masks = {name: (torch.arange(gate.num_gates) % 3 > 0).float() for name, gate in gates(model)}
    with force_gates(model, masks):
        plain, fast = accelerate(model, 'native'), quantised(model)
        expected = count_macs(model, x)
    macs = fast.run_with_macs(x)[1]
    assert macs.dense == expected.dense and torch.equal(macs.per_sample, expected.per_sample)
    assert list(macs.by_module) == list(plain.run_with_macs(x)[1].by_module)


def test_plan():
    model, image = make('gated_resnet50', **SHALLOW), images(1)
    fast, plain = quantised(model), accelerate(model, 'native')
    plan = fast.plan(image, runs=2)
    described = {layer.name: layer.operation for layer in plan.layers if layer.name}
    assert {layer.name for layer in plain.plan(image, runs=1).layers} == {*described, ''}
    assert described['layer1.0.conv1'].startswith('int8 conv 1 x 1') and described['fc'].startswith('int8 conv 1 x 1')
    assert any(layer.operation.startswith('quantize') for layer in plan.layers)
    assert plan.macs == fast.run_with_macs(image)[1].per_sample.item()
    assert all(layer.milliseconds > 0 for layer in plan.layers if layer.name)
    assert plan.isa == ISAS[0] and 'int8 conv' in str(plan)


def as_list(output: Any) -> List[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(getattr(output, 'values', lambda: output)())


@pytest.mark.parametrize('name, kwargs', [
    ('gated_resnet18', SHALLOW), ('convnet_aig_resnet20', {}),
    ('gated_resnet18', dict(SHALLOW, features_only=True, feature_cls='dict', out_indices=(1, 3)))], **names)
def test_copies(name, kwargs, tmp_path):
    """Saved, pickled and copied networks have the same bits, and the same file."""
    fast, x, path = quantised(make(name, **kwargs)), images(2, 48, 40), tmp_path / 'model.tgn'
    fast.save(path)
    expected, macs = fast.run_with_macs(x)
    others = [load_accelerated(path, isa=isa) for isa in ISAS]
    for other in (*others, pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast)):
        output, other_macs = other.run_with_macs(x)
        assert type(output) is type(expected)
        assert all(torch.equal(a, b) for a, b in zip(as_list(output), as_list(expected), strict=True))
        assert torch.equal(macs.per_sample, other_macs.per_sample)
        other.save(tmp_path / 'again.tgn')
        assert (tmp_path / 'again.tgn').read_bytes() == path.read_bytes()
    accelerate(make(name, **kwargs)).save(tmp_path / 'plain.tgn')
    assert path.stat().st_size < 0.35 * (tmp_path / 'plain.tgn').stat().st_size
    with pytest.raises(ValueError, match=r'a quantised network needs the native backend \(QuantizeOp\)'):
        load_accelerated(path, 'torch')


def test_segmentor(tmp_path):
    """The decode head is quantised with the backbone."""
    model, x = segmentor(tmp_path), images(1, 64, 64)
    fast = accelerate(model, precision='int8', calibration=images(2))
    output, expected = fast(x, mode='tensor'), accelerate(model, 'native')(x, mode='tensor')
    assert (output - expected).norm() < 0.5 * expected.norm()
    fast.backbone.save(tmp_path / 'model.tgn')
    assert torch.equal(load_accelerated(tmp_path / 'model.tgn')(x), output)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x, mode='tensor'), output)


def test_calls_at_the_same_time():
    fast = quantised(make())
    batches = [torch.randn(1 + i % 3, 3, 24 + i % 2, 24) for i in range(12)]
    expected = [fast(batch) for batch in batches]
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(fast, batches * 3), expected * 3, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16, torch.bfloat16])
def test_images_of_other_types(dtype):
    fast, x = quantised(make()), images(2, 32, 32).to(dtype)
    assert torch.equal(fast(x), fast(x.float()).to(dtype)) and fast(x).dtype == dtype
    assert fast(x[:0]).shape == (0, 10)


def test_layers_that_are_faster_in_float32(monkeypatch, tmp_path):
    """All convolutions in float32: only the classifier is quantised."""
    monkeypatch.setattr(mixed, '_MARGIN', float('inf'))
    monkeypatch.setattr(mixed, '_is_faster', lambda *args: True)
    model, x = make('gated_resnet18', **SHALLOW), images(2)
    fast, plain = quantised(model), accelerate(model, 'native')
    assert torch.equal(fast.forward_features(x), plain.forward_features(x))
    assert (fast(x) - plain(x)).norm() < 0.1 * plain(x).norm()
    fast.save(tmp_path / 'model.tgn')
    with pytest.raises(ValueError, match=r'a quantised network needs the native backend \(Int8LinearOp\)'):
        load_accelerated(tmp_path / 'model.tgn', 'torch')
