"""One network in several threads, and its replicas and copies: each image is switched by its own gates"""
import copy
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import timm
import torch
import torch.nn as nn
from accelerated import backends
from mmseg.models.backbones.resnet import BasicBlock, Bottleneck
from nets import SMALL, TINY, family, shuffle, without_gates

from mmseg_plugin import GatedResNet, GatedResNetV1c, GatedResNetV1d
from mmseg_plugin.backbones import GatedBasicBlock, GatedBottleneck
from timm_gated import Gating, accelerate, force_gates

MMSEG = [GatedResNet, GatedResNetV1c, GatedResNetV1d]


def timm_model(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, layers=[2] * len(TINY[name]['layers']), **kwargs)


def mmseg_model(cls: type, depth: int) -> Callable[[], nn.Module]:
    return lambda: cls(depth, base_channels=8, stem_channels=8)


NETWORKS = {
    **{name: timm_model(name, num_classes=4) for name in SMALL},
    **{f'skipnet_resnet38 {gate}': timm_model('skipnet_resnet38', num_classes=4, gate=gate) for gate in ('ff1', 'ff2')},
    **{f'{name} features': timm_model(name, features_only=True) for name in SMALL if family(name) != 'dgnet'},
    **{f'{cls.__name__} {depth}': mmseg_model(cls, depth) for cls in MMSEG for depth in (18, 50)},
}

networks = pytest.mark.parametrize('create', NETWORKS.values(), ids=NETWORKS)


def make(create: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = shuffle(create())
    model.eval()  # not chained: mmseg's backbones return None
    return model


def batches(count: int, *shape: int) -> torch.Tensor:
    """Images so different that gates decide differently."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.arange(1., count + 1).pow(2).reshape(-1, *[1] * len(shape))
    return torch.randn(count, *shape, generator=generator) * scale


@torch.no_grad()
def run(model: nn.Module, x: torch.Tensor) -> List[torch.Tensor]:
    out = model(x)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def is_same(ours: List[torch.Tensor], theirs: List[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


@torch.no_grad()
def is_gated(model: nn.Module, x: torch.Tensor) -> bool:
    expected = run(model, x)
    with without_gates(copy.deepcopy(model)) as dense:
        return not is_same(run(dense, x), expected)


@networks
def test_threads(create):
    """In lockstep: no thread is a layer ahead of the other."""
    model = make(create)
    inputs = batches(2, 2, 3, 32, 32)
    expected = [run(model, x) for x in inputs]
    assert is_gated(model, inputs.flatten(0, 1)) and not is_same(*expected)
    barrier = threading.Barrier(2, timeout=20)

    def wait(*args: Any) -> None:
        barrier.wait()

    for module in model.modules():
        if isinstance(module, (Gating, nn.Conv2d)):
            module.register_forward_hook(wait)
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(run, [model, model], inputs))
    assert all(is_same(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))


@networks
def test_replicas(create, monkeypatch):
    """As nn.DataParallel creates them, on another device: they cannot use the parameters of the network."""
    model = make(create)
    x = batches(2, 3, 32, 32)
    expected = run(model, x)
    parallel: Any = importlib.import_module('torch.nn.parallel.replicate')
    monkeypatch.setattr(parallel, '_get_device_index', lambda device, optional: device)
    monkeypatch.setattr(parallel, '_broadcast_coalesced_reshape', lambda tensors, devices, detach=False: [
        [tensor.detach().clone() for tensor in tensors] for _ in devices])
    replicas = parallel.replicate(model, [0, 1])
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    with ThreadPoolExecutor(2) as pool:
        assert all(is_same(out, expected) for out in pool.map(run, replicas, [x, x]))


def shallow_copy(module: nn.Module) -> nn.Module:
    """Separate copies of all modules."""
    copied = copy.copy(module)
    copied._modules = {name: child and shallow_copy(child) for name, child in module._modules.items()}
    return copied


@networks
def test_copies(create):
    model = make(create)
    x = batches(2, 3, 32, 32)
    expected = run(model, x)
    for copied in (copy.copy(model), shallow_copy(model), copy.deepcopy(model)):
        assert is_same(run(copied, x), expected)


@backends
@pytest.mark.parametrize('name', ['convnet_aig_resnet50', 'gated_resnet20 features', 'GatedResNetV1d 50'])
def test_threads_of_an_accelerated_network(name, backend, isa):
    fast = accelerate(make(NETWORKS[name]), backend, isa)
    inputs = batches(4, 2, 3, 32, 32)
    expected = [run(fast, x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(run, [fast] * 20, [*inputs] * 5))
    assert all(is_same(ours, theirs) for ours, theirs in zip(outputs, expected * 5, strict=True))


@pytest.mark.parametrize('cls, plain, convs', [
    (GatedBasicBlock, BasicBlock, ('conv2',)), (GatedBottleneck, Bottleneck, ('conv2', 'conv3'))])
def test_a_block_with_other_convolutions(cls, plain, convs):
    torch.manual_seed(0)
    block = shuffle(cls(16, 4 if plain is Bottleneck else 16))
    block.eval()
    for name in convs:
        old = getattr(block, name)
        setattr(block, name, nn.Conv2d(old.in_channels, old.out_channels, 5, padding=2))
    x = batches(3, 16, 8, 8)
    dense = copy.deepcopy(block)
    dense.__class__ = plain
    with torch.no_grad():
        assert not torch.allclose(block(x), dense(x))
        assert torch.equal(copy.copy(block)(x), block(x))
        with force_gates(block, 'open'):
            torch.testing.assert_close(block(x), dense(x))
        with force_gates(block, 'closed'):
            bias = getattr(block, convs[-1])(torch.zeros_like(dense.relu(dense.norm1(dense.conv1(x)))))
            last = block.norm3 if plain is Bottleneck else block.norm2
            torch.testing.assert_close(block(x), torch.relu(last(bias) + x))
