"""Features of the gated models: features_only, forward_intermediates, output strides"""
import pytest
import timm
import torch
import torch.nn as nn
from models import assert_gates_have_gradients, blueprint, create, dense_copy, images
from nets import GATED, SMALL, TINY, family, gate_loss, is_bottleneck, is_imagenet, without_gates

from timm_gated import gates


def family_info(name: str, channels: tuple = (64, 128, 256, 512)) -> tuple:
    """Channels and reductions of the features."""
    if not is_imagenet(name):
        return [16, 16, 32, 64], [1, 1, 2, 4]
    wide = 4 if is_bottleneck(name) else 1
    return [64] + [wide * c for c in channels], [2, 4, 8, 16, 32]


@pytest.mark.parametrize('name', GATED)
def test_features_only(name):
    model = timm.create_model(name, features_only=True, device='meta')
    assert (model.feature_info.channels(), model.feature_info.reduction()) == family_info(name)
    assert len(gates(model)) == len(gates(blueprint(name)))


@pytest.mark.parametrize('name', SMALL)
@pytest.mark.parametrize('out_indices', [(0, 1, 2, 3), (0, 3), (-1,), (-2, -1)])
def test_out_indices(name, out_indices):
    model = timm.create_model(name, features_only=True, out_indices=out_indices, **TINY[name]).eval()
    channels, reductions = family_info(name, **{k: v for k, v in TINY[name].items() if k == 'channels'})
    assert model.feature_info.channels() == [channels[i] for i in out_indices]
    assert [f.shape[1:] for f in model(images(64))] == [
        (channels[i], 64 // reductions[i], 64 // reductions[i]) for i in out_indices]


@pytest.mark.parametrize('name, feature_cls', [
    (name, feature_cls) for name in SMALL for feature_cls in ('list', 'dict', 'hook', 'fx', 'getter')
    if family(name) != 'gaternet' or feature_cls not in ('list', 'dict')])  # these would not run the gater
def test_feature_classes_equal_forward_intermediates(name, feature_cls):
    model = create(name, **TINY[name]).eval()
    kwargs = dict(TINY[name], features_only=True, feature_cls=feature_cls)
    if not is_imagenet(name):
        kwargs.update(out_indices=(0, 1, 2, 3))
    extractor = create(name, **kwargs).eval()
    prefix = dict(hook='body.', fx='graph_module.', getter='model.').get(feature_cls, '')
    extractor.load_state_dict({prefix + k: v for k, v in model.state_dict().items() if not k.startswith('fc.')})
    x = images(64)
    with torch.no_grad():
        features = extractor(x)
        expected = model.forward_intermediates(x, intermediates_only=True)
    features = list(features.values()) if isinstance(features, dict) else features
    assert len(features) == len(expected) == len(family_info(name)[0])
    for feature, intermediate in zip(features, expected, strict=True):
        torch.testing.assert_close(feature, intermediate)
    assert len(gates(extractor)) == len(gates(model))


@pytest.mark.parametrize('feature_cls', ['list', 'fx', 'getter'])
def test_features_train(feature_cls):
    model = create('gated_resnet18', features_only=True, feature_cls=feature_cls, **TINY['gated_resnet18']).train()
    loss = sum(f.pow(2).mean() for f in model(images(64)))
    (loss + gate_loss(model)).backward()
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('name', SMALL)
def test_forward_intermediates(name):
    model = create(name, **TINY[name]).eval()
    x = images(32)
    with torch.no_grad():
        final, intermediates = model.forward_intermediates(x)
        assert len(intermediates) == len(family_info(name)[0])
        assert torch.equal(final, model.forward_features(x)) and torch.equal(final, intermediates[-1])


@pytest.mark.parametrize('name', SMALL)
def test_options_of_forward_intermediates(name):
    model = create(name, **TINY[name]).eval()
    x = images(32)
    with torch.no_grad():
        everything = model.forward_intermediates(x, intermediates_only=True)
        last_two = model.forward_intermediates(x, indices=2, intermediates_only=True)
        chosen = model.forward_intermediates(x, indices=[0, 2], intermediates_only=True)
        stopped, _ = model.forward_intermediates(x, indices=[1], stop_early=True)
    assert [f.shape for f in last_two] == [f.shape for f in everything[-2:]]
    assert torch.equal(last_two[0], everything[-2]) and torch.equal(last_two[1], everything[-1])
    assert torch.equal(chosen[0], everything[0]) and torch.equal(chosen[1], everything[2])
    assert torch.equal(stopped, everything[1])
    with pytest.raises(AssertionError, match='NCHW'):
        model.forward_intermediates(x, output_fmt='NHWC')
    resnet = timm.create_model('resnet18', device='meta')
    assert model.prune_intermediate_layers([0, 1]) == resnet.prune_intermediate_layers([0, 1]) == [0, 1]
    for layer in ('layer2', 'layer3', 'fc'):
        assert type(getattr(model, layer)) is type(getattr(resnet, layer))
    assert model.num_features == model.feature_info[1]['num_chs']
    assert torch.equal(model.forward_intermediates(x, indices=[1], intermediates_only=True)[0], everything[1])


@pytest.mark.parametrize('output_stride', [8, 16, 32])
@pytest.mark.parametrize('name', [name for name in SMALL if is_imagenet(name)])
def test_output_stride_of_imagenet_models(name, output_stride):
    kwargs = dict(TINY[name], output_stride=output_stride, num_classes=4, layers=(2, 2, 2, 2))
    model = create(name, **kwargs).eval()
    dense = dense_copy(name, model, **kwargs)
    x = images(64)
    with without_gates(model), torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-5, atol=1e-5)
    extractor = timm.create_model(name, output_stride=output_stride, features_only=True, **TINY[name]).eval()
    reductions = [min(r, output_stride) for r in (2, 4, 8, 16, 32)]
    assert extractor.feature_info.reduction() == reductions
    assert [64 // f.shape[-1] for f in extractor(x)] == reductions


@pytest.mark.parametrize('output_stride, reductions', [(1, [1, 1, 1, 1]), (2, [1, 1, 2, 2]), (4, [1, 1, 2, 4]),
                                                       (8, [1, 1, 2, 4]), (32, [1, 1, 2, 4])])
def test_output_stride_of_cifar_models(output_stride, reductions):
    extractor = timm.create_model('gated_resnet20', output_stride=output_stride, features_only=True).eval()
    assert extractor.feature_info.reduction() == reductions
    assert [32 // f.shape[-1] for f in extractor(images())] == reductions
    dilations = {m.dilation[0] for m in extractor['layer3'].modules() if isinstance(m, nn.Conv2d)}
    assert max(dilations) == 4 // reductions[-1]
