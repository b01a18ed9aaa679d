"""Gated variants of timm's ResNet family: the same checks for all of them, over the names in timm's registry"""
import dataclasses
import logging

import pytest
import timm
import torch
import torch.nn as nn
from fvcore.nn import FlopCountAnalysis
from models import create, images, open_share
from nets import MECHANISMS, VARIANTS, gating_keys, shuffle
from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg, model_entrypoint
from timm.models.resnet import BasicBlock

from timm_gated import (
    GatedNet,
    GatedResNet,
    checkpoint_filter_fn,
    count_macs,
    export_onnx,
    export_program,
    force_gates,
    gates,
    mac_formula,
    save_pretrained,
)
from timm_gated.inference import onnx_difference
from timm_gated.layers.gate_state import gate_masks
from timm_gated.layers.narrow import gated_channels, inner_channels
from timm_gated.models._family import RESNETS
from timm_gated.models.gated_resnet import FIRST
from timm_gated.models.slim_resnet import SlimResNet
from timm_gated.pruning.filters import keep_used_filters

TINY = dict(layers=(1, 1, 1, 1), channels=(32, 32, 64, 128), num_classes=7)
mechanisms = pytest.mark.parametrize('name', MECHANISMS)


def dense_name(name: str) -> str:
    return name.removeprefix('gated_')


def tiny(name: str) -> dict:
    """Options of a small network. The widths of pruned ones are fixed."""
    return dict(num_classes=7) if name.endswith('_pruned') else TINY


def make(name: str, seed: int = 0, **kwargs) -> nn.Module:
    return create(name, seed, **{**tiny(name), **kwargs}).eval()


def grouped(model: nn.Module) -> int:
    return max(module.groups for module in model.modules() if isinstance(module, nn.Conv2d))


# The registry


def test_all_resnets_of_timm_but_one():
    family = [name for name in timm.list_models(module='resnet') if hasattr(timm.models.resnet, name)]
    assert set(family) - {*RESNETS} == {'resnet50_gn'}
    assert {f'gated_{name}' for name in RESNETS} == {*VARIANTS, *(f'gated_{name}' for name in FIRST)}
    assert {f'slim_{name}' for name in RESNETS} == {*timm.list_models('slim_*')}
    for prefix, cls in (('gated', GatedResNet), ('slim', SlimResNet)):
        entry_point = model_entrypoint(f'{prefix}_resnet50d')
        assert entry_point.__annotations__['return'] is cls and 'resnet50d' in entry_point.__doc__
        assert entry_point.__module__ == cls.__module__


def test_every_tag_of_timm():
    """Configs of the weights are timm's, and so is their address."""
    for name in RESNETS:
        theirs = {tag: cfg for tag, cfg in get_arch_pretrained_cfgs(name).items() if cfg.has_weights}
        ours = {tag: cfg for tag, cfg in get_arch_pretrained_cfgs(f'gated_{name}').items() if cfg.has_weights}
        assert {tag.removeprefix('gated_') for tag in ours if '.dense_' not in tag} == set(theirs)
        for tag, cfg in theirs.items():
            assert ours[f'gated_{tag}'] == dataclasses.replace(cfg, architecture=f'gated_{name}'), tag
        default = get_pretrained_cfg(f'gated_{name}')
        assert default.tag == 'untrained' and not default.has_weights
        assert default.first_conv == get_pretrained_cfg(name).first_conv


# Every variant


@pytest.mark.parametrize('name', [name for name in VARIANTS if name != 'gated_ecaresnet101d_pruned'])  # big
def test_open_gates_equal_timms_network(name):
    dense = shuffle(timm.create_model(dense_name(name), **tiny(name)), 1).eval()
    model, x = make(name), images(64)
    state = dense.state_dict()
    with pytest.raises(ValueError, match='unexpected: layer1.0.other.weight'):
        checkpoint_filter_fn({**state, 'layer1.0.other.weight': torch.zeros(1)}, model)
    result = model.load_state_dict(checkpoint_filter_fn(state, model))
    assert not result.missing_keys and not result.unexpected_keys
    own = model.state_dict()
    assert [key for key in own if key not in gating_keys(model)] == list(state)
    assert all(torch.equal(own[key], value) for key, value in state.items())
    with torch.no_grad(), force_gates(model, 'open'):
        outputs, expected = model(x), dense(x)
    assert expected.std() > 0
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    with torch.no_grad():
        assert not torch.allclose(model(x), expected)
    assert isinstance(model, GatedNet) and model.dense_variant == f'slim_{dense_name(name)}'
    assert model.get_submodule(model.pretrained_cfg['first_conv']) is next(
        module for module in model.modules() if isinstance(module, nn.Conv2d))
    blocks = [block for stage in range(1, 5) for block in model.get_submodule(f'layer{stage}')]
    assert [n for n, _ in gates(model)] == [
        f'layer{stage}.{index}.gate{i}' for stage in range(1, 5)
        for index, block in enumerate(model.get_submodule(f'layer{stage}'))
        for i in range(1, 2 if isinstance(block, BasicBlock) else 3)]
    assert all(
        getattr(block, f'gate{i}').num_gates == getattr(block, f'conv{i}').out_channels
        for block in blocks for i in range(1, block.num_convs))


def test_the_real_depth_and_widths():
    """Not only the small networks of the other tests."""
    for name in ('resnext101_32x8d', 'ecaresnet101d_pruned'):
        model, dense = (timm.create_model(n, device='meta') for n in (f'gated_{name}', name))
        extra = gating_keys(model)
        assert {k: v.shape for k, v in model.state_dict().items() if k not in extra} == {
            k: v.shape for k, v in dense.state_dict().items()}


# One variant of each mechanism


@mechanisms
def test_dense_macs_agree_with_fvcore(name):
    logging.getLogger('fvcore').setLevel(logging.ERROR)
    dense, x = timm.create_model(dense_name(name), **TINY).eval(), images(64, 1)
    analysis = FlopCountAnalysis(dense, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    counted = analysis.by_operator()
    macs = count_macs(make(name), x)
    assert macs.dense == count_macs(dense, x).dense == counted['conv'] + counted['linear']


@mechanisms
@torch.no_grad()
def test_macs_by_hand(name):
    """Every gated convolution against the pairs of open channels, which the masks select from its weight."""
    model, x = make(name), images(64, 2) * torch.tensor([0.5, 3.])[:, None, None, None]
    macs = count_macs(model, x)
    masks = {n: gate.decision for n, gate in gates(model)}
    checked = set()
    for block_name, block in ((n, m) for n, m in model.named_modules() if hasattr(m, 'gated_convs')):
        for index in range(1, block.num_convs + 1):
            conv = getattr(block, f'conv{index}')
            ones = torch.ones(2, 1)
            inputs = masks.get(f'{block_name}.gate{index - 1}', ones).expand(-1, conv.in_channels)
            outputs = masks.get(f'{block_name}.gate{index}', ones).expand(-1, conv.out_channels)
            positions = macs.by_module[f'{block_name}.conv{index}'].dense // conv.weight.numel()
            expected = []
            for n in range(2):
                groups = zip(inputs[n].view(conv.groups, -1), outputs[n].view(conv.groups, -1), strict=True)
                pairs = sum(int(i.sum()) * int(o.sum()) for i, o in groups)
                expected.append(pairs * conv.weight[0, 0].numel() * positions)
            assert macs.by_module[f'{block_name}.conv{index}'].per_sample.tolist() == expected
            checked.add(f'{block_name}.conv{index}')
    assert len(checked) == sum(m.num_convs for m in model.modules() if hasattr(m, 'gated_convs')) >= 8
    assert len(set(macs.per_sample.tolist())) == 2
    formula = mac_formula(model, (3, 64, 64))
    assert formula.used(gate_masks(model)).tolist() == macs.per_sample.tolist()
    assert max(formula.groups.values(), default=1) == grouped(model) or 'blur' in name


@mechanisms
def test_features(name):
    model = make(name)
    features = timm.create_model(name, features_only=True, out_indices=(1, 3), **TINY).eval()
    features.load_state_dict({k: v for k, v in model.state_dict().items() if k in features.state_dict()})
    with torch.no_grad():
        expected = model.forward_intermediates(images(64), indices=[1, 3], intermediates_only=True)
        for ours, theirs in zip(features(images(64)), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@mechanisms
@torch.no_grad()
def test_exports(name, tmp_path):
    model, x = make(name), images(64, 3)
    expected = model(x)
    export_program(model, tmp_path / 'model.pt2', x.shape[1:])
    outputs = torch.export.load(tmp_path / 'model.pt2').module()(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    path = export_onnx(model, tmp_path / 'model.onnx', x.shape[1:], conditional=True)
    assert onnx_difference(path, model, x) < 1e-4 * max(1, expected.abs().max().item())


@mechanisms
def test_training_step(name):
    model = make(name, budget=0.5).train()
    model(images(64, 4)).square().mean().backward()
    for n, gate in gates(model):
        assert gate.fc2.bias.grad.any(), n


# Pruning


@torch.no_grad()
def spread(model: nn.Module) -> nn.Module:
    """Give gates a wide range of biases, so that some are always on and some always off."""
    torch.manual_seed(0)
    for _, gate in gates(model):
        gate.fc2.bias.uniform_(-6, 6)
    return model


@mechanisms
def test_pruning_removes_what_never_changes(name, tmp_path):
    model, x = spread(make(name)), images(64, 16)
    pruned = keep_used_filters(model, open_share(model, x), threshold=1.)
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(pruned(x), model(x), atol=1e-5, rtol=1e-4)
    save_pretrained(pruned, tmp_path / 'pruned')
    loaded = timm.create_model(f'local-dir:{tmp_path / "pruned"}', pretrained=True).eval()
    assert inner_channels(loaded) == inner_channels(pruned) and gated_channels(loaded) == gated_channels(pruned)
    with torch.no_grad():
        assert torch.equal(loaded(x), pruned(x))
    twice = keep_used_filters(pruned, open_share(pruned, x), threshold=1.)
    assert inner_channels(twice) == inner_channels(pruned)


@mechanisms
def test_pruning_to_a_dense_network(name, tmp_path):
    """Every gate always decides the same. The result is the slim variant, a dense ResNet."""
    model, x = spread(make(name)), images(64, 4)
    shares = {n: (gate.fc2.bias.detach() > 0).double() for n, gate in gates(model)}
    pruned = keep_used_filters(model, shares)
    assert type(pruned) is SlimResNet and pruned.pretrained_cfg['architecture'] == f'slim_{dense_name(name)}'
    with torch.no_grad(), force_gates(model, {n: share for n, share in shares.items()}):
        torch.testing.assert_close(pruned(x), model(x), atol=1e-5, rtol=1e-4)
    save_pretrained(pruned, tmp_path / 'slim')
    loaded = timm.create_model(f'local-dir:{tmp_path / "slim"}', pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), pruned(x))


def test_groups_by_hand():
    """Two groups of four filters. The first keeps one filter of map 1, so it keeps a second one that is always off."""
    model = make('gated_resnext50_32x4d', cardinality=2, base_width=8)
    block = model.layer1[0]
    assert block.conv2.groups == 2 and block.conv2.in_channels == 8
    everything = {name: torch.full((gate.num_gates,), 0.5) for name, gate in gates(model)}
    share = torch.tensor([0.004, 0.002, 0.5, 0.001, 0.999, 0.003, 0.5, 0.])
    small = keep_used_filters(model, {**everything, 'layer1.0.gate1': share}).layer1[0]
    kept = [0, 2, 4, 6]
    assert small.conv2.in_channels == 4 and small.conv2.groups == 2
    assert torch.equal(small.conv1.weight, block.conv1.weight[kept])
    assert torch.equal(small.conv2.weight, torch.cat((block.conv2.weight[:4, [0, 2]], block.conv2.weight[4:, [0, 2]])))
    assert torch.equal(small.gate1.fc2.bias, block.gate1.fc2.bias[kept]) and small.gate1.num_ungated == 0
    share = torch.tensor([0., 0., 1., 0., 1., 0., 1., 0.])  # nothing conditional
    small = keep_used_filters(model, {**everything, 'layer1.0.gate1': share}).layer1[0]
    assert small.gate1 is None and small.conv1.out_channels == 4
    assert not small.conv2.weight[:4, 0].any()  # filter 0 is never read
    assert torch.equal(small.conv2.weight[:4, 1], block.conv2.weight[:4, 2])
    small = keep_used_filters(model, {**everything, 'layer1.0.gate2': share}).layer1[0]
    assert small.gate2 is None and small.conv2.weight.shape == (4, 4, 3, 3)
    assert torch.equal(small.conv2.weight, block.conv2.weight[kept])
    assert torch.equal(small.conv3.weight[:, 1:], block.conv3.weight[:, kept[1:]])
    assert not small.conv3.weight[:, 0].any()
