"""timm models as mmseg backbones, and their initial weights"""
import logging

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import safetensors.torch
import timm
import torch
from mmengine.config import Config
from mmengine.model import BaseModule
from mmengine.runner import load_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader
from mmseg.registry import HOOKS, METRICS, MODELS
from mmseg_small import LOSSES, samples, segmentor
from nets import ONE_EACH, VARIANTS, images, shuffle
from paths import ROOT
from timm.models import get_arch_name, get_pretrained_cfg

from mmseg_plugin import GatedResNet, TimmGatedBackbone
from mmseg_plugin.convert import mmseg_to_timm
from timm_gated import (
    GateLosses,
    accelerate,
    count_macs,
    force_gates,
    gates,
    l0_loss,
    list_gated_models,
    save_pretrained,
)
from timm_gated.layers.gate_state import gate_logits
from timm_gated.loss.gate_losses import batch_shaping_loss
from timm_gated.loss.objective import objectives
from timm_gated.models._registry import list_weights

CONFIG = ROOT / 'configs' / 'mmseg' / 'pspnet' / 'gated-pspnet_r20-d4_1xb8-600-c10-pre_camvid-160x208.py'
PACKAGED = [
    name for name in list_weights() if get_pretrained_cfg(name).file and '.dense_' not in name]
IMAGES = images(2, 3, 32, 32)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def download(*args, **kwargs):
        pytest.fail('weights were downloaded')

    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', download)
    monkeypatch.setattr('mmseg_plugin.checkpoints.load_state_dict_from_hf', download)


def backbone(model_name: str = 'gated_resnet20', checkpoint: str = '', **kwargs) -> BaseModule:
    init_cfg = dict(type='Pretrained', checkpoint=checkpoint) if checkpoint else None
    built = MODELS.build(dict(type='TimmGatedBackbone', model_name=model_name, init_cfg=init_cfg, **kwargs))
    built.init_weights()
    built.eval()
    return built


def timm_segmentor(model_name='gated_resnet20', checkpoint='', **kwargs):
    init_cfg = dict(type='Pretrained', checkpoint=checkpoint) if checkpoint else None
    backbone = dict(type='TimmGatedBackbone', model_name=model_name, init_cfg=init_cfg)
    model = segmentor(backbone, in_channels=64, gate_losses=LOSSES, **kwargs)
    model.init_weights()
    return model


@pytest.fixture
def trained(tmp_path):
    """A gated model with random weights, and the folder it is saved in."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20')).eval()
    return model, save_pretrained(model, tmp_path / 'trained')


def assert_same_features(built: BaseModule, model: torch.nn.Module) -> None:
    with torch.no_grad():
        expected = model.eval().forward_intermediates(IMAGES, intermediates_only=True)
        for ours, theirs in zip(built(IMAGES), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


# The backbone


@pytest.mark.parametrize('name', [*ONE_EACH, 'cifar_resnet20', 'slim_resnet18'])
def test_features_are_those_of_the_timm_model(name):
    built = backbone(name)
    model = timm.create_model(name)
    model.load_state_dict(mmseg_to_timm(built.state_dict()), strict=False)
    assert_same_features(built, model)
    assert bool(gates(built)) == (name in list_gated_models()) and not objectives(built)


@pytest.mark.parametrize('name', VARIANTS)
def test_variants_from_dense_weights(name, tmp_path, caplog):
    # The widths of pruned networks are fixed.
    options = {} if name.endswith('_pruned') else dict(layers=(1, 1, 1, 1), channels=(32, 32, 64, 128))
    dense = shuffle(timm.create_model(name.removeprefix('gated_'), **options)).eval()
    torch.save(dense.state_dict(), tmp_path / 'dense.pth')
    built = backbone(name, str(tmp_path / 'dense.pth'), **options)
    count = len(gates(built))
    assert count and f'no weights for {count} of {count} gates' in caplog.text
    with force_gates(built, 'open'):
        assert_same_features(built, dense)


def test_options():
    built = backbone(out_indices=(1, 3), output_stride=2, in_channels=1, gate_bias=3., inner_width=2)
    maps = built(torch.zeros(2, 1, 32, 32))
    assert [tuple(feature.shape) for feature in maps] == [(2, 16, 32, 32), (2, 64, 16, 16)]
    assert all((gate.fc2.bias == 3).all() and gate.num_gates % 32 == 0 for _, gate in gates(built))
    built = backbone('gated_resnet18', output_stride=8)
    assert [64 // feature.shape[-1] for feature in built(torch.zeros(1, 3, 64, 64))] == [2, 4, 8, 8, 8]


def test_no_weights_without_init_cfg():
    torch.manual_seed(0)
    expected = timm.create_model('gated_resnet20', features_only=True).state_dict()
    torch.manual_seed(0)
    own = backbone().timm_model.state_dict()
    assert own.keys() == expected.keys() and all(torch.equal(own[key], expected[key]) for key in own)


@pytest.mark.parametrize('args, message', [
    (dict(model_name='gated_resnet21'), "no model 'gated_resnet21'; near: .*gated_resnet20"),
    (dict(model_name='gated_resnet20.bas_c10'), "no tag.*checkpoint='timm-gated://gated_resnet20.bas_c10'"),
    (dict(model_name='gated_resnet20', pretrained=True), 'init_cfg.*got the option pretrained'),
    (dict(model_name='gated_resnet20', checkpoint_path='x.pth'), 'init_cfg.*got the option checkpoint_path'),
    (dict(model_name='gated_resnet20', output_stride=3), 'output_stride must be .* got 3'),
])
def test_bad_options(args, message):
    with pytest.raises(ValueError, match=message):
        TimmGatedBackbone(**args)


# Weights


@pytest.mark.parametrize('name', PACKAGED)
def test_packaged_weights(name):
    stored = safetensors.torch.load_file(get_pretrained_cfg(name).file)
    built = backbone(get_arch_name(name), f'timm-gated://{name}')
    own = built.timm_model.state_dict()
    assert own and all(torch.equal(own[key], stored[key]) for key in own)
    assert {key for key in stored if key not in own} == {'fc.weight', 'fc.bias'}
    assert_same_features(built, timm.create_model(name, pretrained=True))


def test_weights_of_the_config():
    model = MODELS.build(Config.fromfile(CONFIG).model)
    model.init_weights()
    model.eval()
    assert_same_features(model.backbone, timm.create_model('gated_resnet20.bas_c10', pretrained=True))


def test_weights_of_a_folder(trained, caplog):
    model, folder = trained
    with caplog.at_level(logging.WARNING):
        built = backbone(checkpoint=f'timm-gated://local-dir:{folder}')
    assert_same_features(built, model)
    assert 'do not match' not in caplog.text and 'fresh' not in caplog.text
    assert_same_features(backbone(f'local-dir:{folder}', f'timm-gated://local-dir:{folder}'), model)


@pytest.mark.parametrize('suffix', ['safetensors', 'pth'])
def test_weights_of_a_file(trained, suffix, tmp_path):
    """The complete state dict of the timm model, with its classifier."""
    model, _ = trained
    path = tmp_path / f'model.{suffix}'
    safetensors.torch.save_file(model.state_dict(), path) if suffix != 'pth' else torch.save(model.state_dict(), path)
    assert_same_features(backbone(checkpoint=str(path)), model)


def test_weights_of_fewer_stages(trained):
    model, folder = trained
    built = backbone(checkpoint=f'timm-gated://local-dir:{folder}', out_indices=(1, 2))
    with torch.no_grad():
        expected = model.forward_intermediates(IMAGES, indices=[1, 2], intermediates_only=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(built(IMAGES), expected, strict=True))


@pytest.mark.parametrize('prefix, out_indices', [
    ('', (0, 1, 2, 3)), ('', (1, 2)), ('timm_model.', (0, 1, 2, 3)), ('timm_model.model.', (0, 1, 2, 3))])
def test_weights_of_feature_getters(prefix, out_indices, tmp_path):
    """Weights of the timm model or of a backbone, with timm's FeatureListNet or FeatureGetterNet."""
    model = shuffle(timm.create_model('gaternet_resnet20')).eval()
    torch.save({prefix + key: value for key, value in model.state_dict().items()}, tmp_path / 'model.pth')
    built = backbone('gaternet_resnet20', str(tmp_path / 'model.pth'), out_indices=out_indices)
    with torch.no_grad():
        expected = model.forward_intermediates(IMAGES, indices=list(out_indices), intermediates_only=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(built(IMAGES), expected, strict=True))


def test_weights_of_a_deep_stem(tmp_path):
    options = dict(stem_type='deep', stem_width=32, avg_down=True, layers=(1, 1, 1, 1))
    model = shuffle(timm.create_model('gated_resnet18', **options)).eval()
    save_pretrained(model, tmp_path / 'deep')
    assert_same_features(backbone('gated_resnet18', f'timm-gated://local-dir:{tmp_path / "deep"}', **options), model)


def test_weights_into_a_backbone_of_mmseg(tmp_path):
    """Parameters get mmseg's names, and the classifier is dropped."""
    model = shuffle(timm.create_model('gated_resnet18', stem_type='deep', stem_width=32)).eval()
    save_pretrained(model, tmp_path / 'deep')
    checkpoint = f'timm-gated://local-dir:{tmp_path / "deep"}'
    built = MODELS.build(dict(
        type='GatedResNetV1c', depth=18, init_cfg=dict(type='Pretrained', checkpoint=checkpoint)))
    built.init_weights()
    assert CheckpointLoader.load_checkpoint(checkpoint).keys() == built.state_dict().keys()
    assert torch.equal(built.stem[0].weight, model.conv1[0].weight)
    assert torch.equal(built.layer4[1].gate1.fc2.weight, model.layer4[1].gate1.fc2.weight)


def test_weights_from_the_hub(monkeypatch, caplog):
    dense, asked = timm.create_model('resnet18'), []

    def hub(model_id, *args, **kwargs):
        asked.append(model_id)
        return dict(dense.state_dict())

    monkeypatch.setattr('mmseg_plugin.checkpoints.load_state_dict_from_hf', hub)
    for name in ('gated_resnet18.dense_a1_in1k', 'hf-hub:owner/name'):
        caplog.clear()
        built = backbone('gated_resnet18', f'timm-gated://{name}')
        assert torch.equal(built.timm_model.layer4[1].conv2.weight, dense.layer4[1].conv2.weight)
        assert 'no weights for 8 of 8 gates' in caplog.text
    assert asked == ['timm/resnet18.a1_in1k', 'owner/name']


@pytest.mark.parametrize('name, message', [
    ('gated_resnet20.basc10', "no weights 'gated_resnet20.basc10'; it has: .*gated_resnet18.dense_a1_in1k"),
    ('gated_resnet18', "no weights 'gated_resnet18'; it has: "),
    ('resnet18.a1_in1k', "no weights 'resnet18.a1_in1k'; it has: (?!.*, resnet18)"),
    ('gated_resnet18.untrained', "no weights 'gated_resnet18.untrained'"),
    ('local-dir:nowhere', "no folder 'nowhere'"),
    ('s3:bucket', "'s3'"),
])
def test_unknown_weights(name, message):
    with pytest.raises(ValueError, match=message):
        backbone(checkpoint=f'timm-gated://{name}')


@pytest.mark.parametrize('name', PACKAGED)
def test_error_lists_packaged_weights(name):
    with pytest.raises(ValueError, match=f'it has: .*{name}'):
        backbone(checkpoint='timm-gated://gated_resnet20.nothing')


def test_missing_file():
    with pytest.raises(FileNotFoundError, match='nowhere.safetensors'):
        backbone(checkpoint='nowhere.safetensors')


@pytest.mark.parametrize('address', ['s3://bucket/x.safetensors', 'https://host/x.safetensors', 'a.pth', 'safetensors'])
def test_remote_files_keep_their_loaders(address):
    assert CheckpointLoader._get_checkpoint_loader(address).__name__ != 'load_from_safetensors'


@pytest.mark.parametrize('name, options, message', [
    ('gated_resnet32', {}, '3-3-3 blocks.*5-5-5'),
    ('gated_resnet18', {}, '3-3-3 blocks.*2-2-2-2'),
    ('gated_resnet20', dict(inner_width=2), 'other shapes: layer1.0.bn1'),
    ('cifar_resnet20', {}, 'unexpected: layer1.0.gate1'),
    ('convnet_aig_resnet20', {}, 'unexpected: layer1.0.gate1'),
])
def test_weights_that_do_not_fit(trained, name, options, message):
    with pytest.raises(ValueError, match=message):
        backbone(name, f'timm-gated://local-dir:{trained[1]}', **options)


def test_weights_of_another_depth_into_a_backbone_of_mmseg(trained):
    cfg = dict(type='Pretrained', checkpoint=f'timm-gated://local-dir:{trained[1]}')
    with pytest.raises(ValueError, match='3-3-3 blocks.*2-2-2-2'):
        GatedResNet(depth=18, init_cfg=cfg).init_weights()


def test_weights_of_another_architecture(tmp_path):
    (tmp_path / 'other').mkdir()
    safetensors.torch.save_file({'x': torch.zeros(1)}, tmp_path / 'other' / 'model.safetensors')
    with pytest.raises(ValueError, match='not those of a ResNet'):
        backbone(checkpoint=f'timm-gated://local-dir:{tmp_path / "other"}')
    with pytest.raises(ValueError, match='missing: '):
        backbone(checkpoint=str(tmp_path / 'other' / 'model.safetensors'))


@pytest.mark.parametrize('name', ['model.safetensors', 'pytorch_model.bin'])
def test_truncated_weights(tmp_path, name):
    model = timm.create_model('gated_resnet20', layers=(1, 1, 1))
    save = safetensors.torch.save_file if name.endswith('safetensors') else torch.save
    save(model.state_dict(), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for size in (0, 10, len(content) // 2):
        (tmp_path / name).write_bytes(content[:size])
        with pytest.raises(ValueError, match=f'{tmp_path / name} is truncated'):
            backbone(checkpoint=f'timm-gated://local-dir:{tmp_path}')


# In a segmentor


def test_training_step(trained):
    model = timm_segmentor(checkpoint=f'timm-gated://local-dir:{trained[1]}')
    assert not any(isinstance(module, GateLosses) for module in model.modules())
    model.train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = model.loss(images(8, 3, 32, 32), samples(8, 32))
    logits = gate_logits(model)
    torch.testing.assert_close(losses['loss_batch_shaping'], 0.2 * batch_shaping_loss(logits.sigmoid()))
    torch.testing.assert_close(losses['loss_l0'], 0.1 * l0_loss(logits))
    total, _ = model.parse_losses(losses)
    torch.testing.assert_close(total, losses['decode.loss_ce'] + losses['loss_batch_shaping'] + losses['loss_l0'])
    total.backward()
    optimizer.step()
    assert len(gates(model)) == 9
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        assert name.endswith('.fc1.bias') or not torch.equal(parameter, before[name]), name  # a norm follows it


def test_macs_and_statistics_and_acceleration(trained):
    model = timm_segmentor(checkpoint=f'timm-gated://local-dir:{trained[1]}', count_macs=True)
    model.eval()
    metric, hook = METRICS.build(dict(type='MACsMetric')), HOOKS.build(dict(type='GateStatisticsHook'))
    with torch.no_grad():
        results = model.predict(IMAGES, samples(2, 32))
        hook._statistics.update(model)
        counted = count_macs(model, IMAGES)
        assert [result.macs for result in results] == counted.per_sample.tolist()
        metric.process(None, [result.to_dict() for result in results])
        assert 0 < metric.evaluate(size=2)['MACs_share'] < 100
        assert {f'gates/layer{stage}/density' for stage in (1, 2, 3)} <= set(hook.scalars())
        fast = accelerate(model)
        assert not gates(fast)
        torch.testing.assert_close(
            fast(IMAGES, mode='tensor'), model(IMAGES, mode='tensor'), atol=1e-4, rtol=1e-4)


def test_checkpoints_of_a_segmentor(tmp_path):
    first, second = (shuffle(timm_segmentor(), seed) for seed in (0, 1))
    torch.save({'state_dict': first.state_dict()}, tmp_path / 'iter_1.pth')
    load_checkpoint(second, str(tmp_path / 'iter_1.pth'), strict=True)
    assert all(torch.equal(value, first.state_dict()[key]) for key, value in second.state_dict().items())
    with pytest.raises(ValueError, match='3-3-3 blocks.*5-5-5'):
        load_checkpoint(timm_segmentor('gated_resnet32'), str(tmp_path / 'iter_1.pth'))
    heads = {key: value for key, value in first.state_dict().items() if not key.startswith('backbone.')}
    assert second.load_state_dict(heads, strict=False).unexpected_keys == []

    back = timm.create_model('gated_resnet20')
    missing = back.load_state_dict(mmseg_to_timm(first.state_dict()), strict=False)
    assert missing.missing_keys == ['fc.weight', 'fc.bias'] and not missing.unexpected_keys
