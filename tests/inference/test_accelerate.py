"""Accelerated networks have the outputs of the masked ones, on every backend and instruction set"""
import copy
import gc
import pickle

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import pytest
import timm
import torch
import torch.nn as nn
from accelerated import backends, check, images
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmseg.models.backbones import ResNet
from mmseg.registry import MODELS
from mmseg_small import write_config
from nets import shuffle
from timm.models.resnet import ResNet as ResNetOfTimm

from mmseg_plugin import GatedResNet, GatedResNetV1c, GatedResNetV1d, GatedResNeXt
from timm_gated import ChannelGate, accelerate, force_gates, gates, instruction_sets
from timm_gated.inference import native

D8 = dict(dilations=(1, 1, 2, 4), strides=(1, 2, 1, 1), contract_dilation=True)
SHALLOW = dict(layers=(1, 1, 1, 1))


def test_kernels_were_built():
    assert not native.why_not()
    assert instruction_sets()[-1] == 'portable'


@backends
@pytest.mark.parametrize('name, size, kwargs', [
    ('gated_resnet34', (224, 224), {}),
    ('gated_resnet50', (97, 130), {}),
    ('gated_resnet18', (33, 65), {}),
    ('gated_resnet18', (1, 1), {}),
    ('gated_resnet50', (75, 61), dict(SHALLOW, stem_type='deep', stem_width=32, avg_down=True)),
    ('gated_resnet18', (64, 64), dict(SHALLOW, replace_stem_pool=True)),
    ('gated_resnet34', (96, 64), dict(SHALLOW, output_stride=8)),
    ('gated_resnet50', (64, 96), dict(SHALLOW, output_stride=16, gated_maps=(1,))),
    ('gated_resnet50', (64, 64), dict(SHALLOW, gated_maps=(2,), in_chans=1, num_classes=0)),
    ('gated_resnet18', (64, 96), dict(SHALLOW, features_only=True)),
    ('gated_resnet50', (64, 64), dict(SHALLOW, features_only=True, out_indices=(1, 3), output_stride=8)),
    ('gated_resnet20', (32, 32), {}),
    ('gated_resnet20', (19, 37), dict(output_stride=1)),
    ('gated_resnet20_w10', (32, 32), {}),
    ('gated_resnet20', (32, 32), dict(features_only=True)),
    ('convnet_aig_resnet18', (64, 64), {}),
    ('convnet_aig_resnet34', (33, 65), dict(SHALLOW, output_stride=8)),
    ('convnet_aig_resnet50', (75, 61), dict(SHALLOW, stem_type='deep', stem_width=32, avg_down=True)),
    ('convnet_aig_resnet20', (19, 37), dict(features_only=True)),
    ('resnet18', (64, 64), {}),
    ('resnet26d', (64, 64), SHALLOW),
    ('cifar_resnet20', (32, 32), {}),
], ids=lambda value: '-'.join(map(str, value)) if isinstance(value, (tuple, dict)) else None)
def test_networks(name, size, kwargs, backend, isa):
    torch.manual_seed(0)
    model = shuffle(timm.create_model(name, **kwargs)).eval()
    check(model, images(2, *size, channels=kwargs.get('in_chans', 3)), backend, isa)


@backends
@pytest.mark.parametrize('masks', ['open', 'closed', 'alternating'])
def test_forced_gates(masks, backend, isa):
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet50', layers=(1, 2, 2, 1))).eval()
    if masks == 'alternating':  # blocks with all filters open or all closed
        masks = {name: torch.full((gate.num_gates,), i % 3 > 0) for i, (name, gate) in enumerate(gates(model))}
    with force_gates(model, masks):
        check(model, images(), backend, isa)


def test_per_image_forced_masks_are_refused():
    model = timm.create_model('gated_resnet20').eval()
    with force_gates(model, {'layer1.0.gate1': torch.ones(2, 16)}):
        with pytest.raises(ValueError, match='force the same mask'):
            accelerate(model)


@backends
@pytest.mark.parametrize('cls, kwargs', [
    (GatedResNet, dict(depth=18)), (GatedResNetV1c, dict(depth=50, **D8)), (GatedResNetV1d, dict(depth=18, **D8)),
    (GatedResNet, dict(depth=50, style='caffe', out_indices=(0, 2))), (ResNet, dict(depth=18)),
    (GatedResNeXt, dict(depth=50, groups=4, base_width=8, base_channels=16, **D8))])
def test_backbones_of_mmseg(cls, kwargs, backend, isa):
    torch.manual_seed(0)
    model = shuffle(cls(**kwargs))
    model.eval()  # returns None in mmseg
    check(model, images(2, 63, 80), backend, isa)


@pytest.mark.parametrize('backbone', [None, dict(type='TIMMBackbone', model_name='gated_resnet18')])
def test_segmentor(tmp_path, backbone):
    config = Config.fromfile(write_config(tmp_path))
    if backbone is not None:
        config.model.backbone = dict(**backbone, features_only=True, pretrained=False)
        config.model.decode_head.update(in_channels=512, in_index=4)
        config.model.auxiliary_head.update(in_channels=256, in_index=3)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = shuffle(MODELS.build(config.model))
    model.eval()
    with torch.no_grad():
        expected = model(images(), mode='tensor')
        fast = accelerate(model)
        assert gates(model) and not gates(fast)
        torch.testing.assert_close(fast(images(), mode='tensor'), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('isa', instruction_sets())
@pytest.mark.parametrize('name, count, size', [
    ('gated_resnet50', 5, 64), ('gated_resnet34', 1, 224), ('convnet_aig_resnet34', 5, 64),
    ('seresnext26d_32x4d', 5, 64), ('resnetblur18', 1, 64)])
def test_threads_give_the_same_result(name, count, size, isa):
    torch.manual_seed(0)
    fast = accelerate(shuffle(timm.create_model(name, **SHALLOW)).eval(), 'native', isa)
    x = images(count, size, size)
    alone = fast.forward_features(x)
    try:
        for threads in (2, 3, 8):
            torch.set_num_threads(threads)
            for some in {1, min(2, count), count}:  # threads share a sample, have their own, or both
                assert torch.equal(fast.forward_features(x[:some]), alone[:some])
    finally:
        torch.set_num_threads(1)


@backends
@pytest.mark.parametrize('name', ['convnet_aig_resnet18', 'convnet_aig_resnet50'])
def test_skipped_blocks_are_not_computed(name, backend, isa):
    """Closed weights are set to NaN; the outputs must not change."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model(name)).eval()
    masks = {name: torch.tensor([index % 2]) for index, (name, _) in enumerate(gates(model))}
    with force_gates(model, masks):
        expected = model(images())
        for name, mask in masks.items():
            if not mask:
                block = model.get_submodule(name.rpartition('.')[0])
                for conv in block.convs:
                    nn.init.constant_(block.get_submodule(conv).weight, torch.nan)
        actual = accelerate(model, backend, isa)(images())
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@backends
def test_images_skip_blocks_of_their_own(backend, isa):
    torch.manual_seed(0)
    model = shuffle(timm.create_model('convnet_aig_resnet110')).eval()
    x = images(4, 32, 32) * torch.tensor([0.1, 1., 3., 9.])[:, None, None, None]
    check(model, x, backend, isa)
    decisions = torch.cat([gate.decision for _, gate in gates(model)], 1)
    assert len(decisions.unique(dim=0)) == 4


class OtherGate(ChannelGate):
    """A subclass without changes."""


def test_other_gates_are_refused_by_name():
    model = timm.create_model('gated_resnet20').eval()
    model.layer2[1].gate1 = OtherGate(32, 32)
    with pytest.raises(ValueError, match='OtherGate.*cannot be accelerated'):
        accelerate(model)


@backends
def test_closed_filters_are_not_computed(backend, isa):
    """Closed weights are set to NaN; the outputs must not change."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet50')).eval()
    masks = {name: torch.arange(gate.num_gates) % 3 > 0 for name, gate in gates(model)}
    with force_gates(model, masks):
        expected = model(images())
        for name, mask in masks.items():
            block, index, closed = model.get_submodule(name.rpartition('.')[0]), int(name[-1]), ~mask
            getattr(block, f'conv{index}').weight.data[closed] = torch.nan
            getattr(block, f'conv{index + 1}').weight.data[:, closed] = torch.nan
        torch.testing.assert_close(accelerate(model, backend, isa)(images()), expected, atol=1e-4, rtol=1e-4)


def test_garbage_collection_in_any_order():
    fast = accelerate(timm.create_model('gated_resnet20'), 'native')
    fast(images(1, 32, 32))
    cycle = {'fast': fast}
    cycle['itself'] = cycle
    del fast, cycle
    gc.collect()


def test_outputs_do_not_depend_on_earlier_sizes():
    torch.manual_seed(0)
    fast = accelerate(shuffle(timm.create_model('gated_resnet20')).eval(), 'native')
    sizes = [(32, 32 + i) for i in range(6)]
    first = [fast(images(1, *size)) for size in sizes]
    for size, expected in zip(sizes, first, strict=True):
        assert torch.equal(fast(images(1, *size)), expected)


def test_it_is_for_evaluation_only():
    model = timm.create_model('gated_resnet20')
    fast = accelerate(model)
    assert model.training and not fast.training and not fast.eval().training
    with pytest.raises(ValueError, match='evaluation only'):
        fast.train()
    x = images(1, 32, 32)
    assert torch.equal(copy.deepcopy(fast)(x), fast(x))
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x), fast(x))
    with pytest.raises(ValueError, match='cannot be traced'):
        torch.jit.trace(fast, x)
    torch.testing.assert_close(torch.compile(fast, backend='aot_eager')(x), fast(x))


@backends
def test_network_and_accelerated_network_are_independent(backend, isa):
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20')).eval()
    before = copy.deepcopy(model.state_dict())
    fast = accelerate(model, backend, isa)
    expected = fast(images(1, 32, 32))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(fast(images(1, 32, 32)), expected)


@pytest.mark.parametrize('kwargs, message', [
    (dict(backend='cuda'), "one of auto, native, torch, got 'cuda'"),
    (dict(isa='sse9', backend='native'), "no instruction set 'sse9'"),
    (dict(backend='torch', isa='avx2'), 'an option of the native backend'),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        accelerate(timm.create_model('gated_resnet20'), **kwargs)


@pytest.mark.parametrize('name, kwargs, culprit', [
    ('legacy_seresnet18', dict(features_only=True), 'SEResNetBlock'),
    ('skresnet18', {}, 'SelectiveKernelBasic'),
    ('resnext26ts', {}, 'ByobNet'),
    ('gated_resnet18', dict(act_layer='gelu'), 'GELU'),
    ('gated_resnet18', dict(norm_layer='groupnorm'), 'GroupNorm'),
    ('vit_tiny_patch16_224', {}, 'VisionTransformer'),
    ('gated_resnet18', dict(features_only=True, feature_cls='getter'), "feature_cls='list'"),
])
def test_errors_name_the_unsupported_module(name, kwargs, culprit):
    with pytest.raises(ValueError, match=culprit):
        accelerate(timm.create_model(name, **kwargs))


class Halved(ResNetOfTimm):
    def forward_features(self, x):
        return super().forward_features(x) / 2


def test_networks_that_override_the_forward_pass_are_refused():
    with pytest.raises(ValueError, match='overrides the forward pass'):
        accelerate(Halved(timm.models.resnet.BasicBlock, (1, 1, 1, 1)))
    model = timm.create_model('resnet18')
    model.layer1[0].__class__ = type('Other', (timm.models.resnet.BasicBlock,), {'forward': lambda self, x: x})
    with pytest.raises(ValueError, match='forward pass is not known'):
        accelerate(model)


def test_without_kernels(monkeypatch):
    monkeypatch.setattr(native, '_library', None)
    monkeypatch.setattr(native, '_load_error', '_native.so: cannot open')
    model = timm.create_model('gated_resnet20')
    assert accelerate(model).backend == 'torch' and not instruction_sets()
    with pytest.raises(RuntimeError, match='Install a C compiler'):
        accelerate(model, 'native')
