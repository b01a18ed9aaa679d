"""Gated backbones, losses, hooks and converter of mmseg_plugin"""
import copy
import logging
import pickle
import sys
from types import SimpleNamespace

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import mmengine
import pytest
import safetensors.torch
import timm
import torch
from mmengine.runner import IterBasedTrainLoop
from mmseg.models.backbones import ResNet, ResNetV1c, ResNetV1d, ResNeXt
from mmseg.registry import HOOKS, MODELS
from mmseg_small import LOSSES, fcn_head, samples, segmentor
from nets import gate_loss, images, shuffle
from tool import run_tool
from torch.utils.data import DataLoader

from mmseg_plugin import GatedResNet, GatedResNetV1c, GatedResNetV1d, GatedResNeXt, SlimResNet
from mmseg_plugin.compat import stand_in_for_compiled_ops
from mmseg_plugin.convert import mmseg_to_timm, timm_to_mmseg
from timm_gated import force_gates, gates, l0_loss
from timm_gated.layers.gate_state import gate_logits
from timm_gated.loss.gate_losses import batch_shaping_loss

D8 = dict(dilations=(1, 1, 2, 4), strides=(1, 2, 1, 1), contract_dilation=True)
X32 = dict(groups=32, base_width=4)
IMAGES = images(2, 3, 64, 64)
DENSE = [
    (gated_cls, dense_cls, depth, kwargs)
    for gated_cls, dense_cls in ((GatedResNet, ResNet), (GatedResNetV1c, ResNetV1c), (GatedResNetV1d, ResNetV1d))
    for depth, kwargs in ((18, D8), (34, {}), (50, D8), (101, {}), (152, {}))]
DENSE += [
    (GatedResNeXt, ResNeXt, 50, dict(X32, **D8)), (GatedResNeXt, ResNeXt, 101, dict(groups=8, base_width=2)),
    (GatedResNeXt, ResNeXt, 50, dict(X32, deep_stem=True, avg_down=True))]


@pytest.mark.parametrize('gated_cls, dense_cls, depth, kwargs', DENSE)
def test_open_gates_reproduce_the_dense_backbone(gated_cls, dense_cls, depth, kwargs):
    kwargs = dict(kwargs, depth=depth, base_channels=16, stem_channels=16)
    dense, gated = dense_cls(**kwargs), gated_cls(**kwargs)
    shuffle(dense)
    mmengine.runner.checkpoint.load_state_dict(gated, dense.state_dict(), strict=True)  # as with init_cfg
    dense.eval()
    gated.eval()
    with torch.no_grad(), force_gates(gated, 'open'):
        for ours, theirs in zip(gated(IMAGES), dense(IMAGES), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('depth, last', [(18, 'norm2'), (50, 'norm3')])
def test_closed_gates_leave_the_shortcut(depth, last):
    backbone = shuffle(GatedResNet(depth=depth))
    backbone.eval()
    block = backbone.layer2[0]
    x = torch.randn(2, block.conv1.in_channels, 8, 8)
    with torch.no_grad(), force_gates(block, 'closed'):
        shortcut = block.downsample(x)
        expected = (shortcut + getattr(block, last)(torch.zeros_like(shortcut))).relu()
        torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize('depth', [18, 50])
def test_checkpointing_keeps_the_gates_gradient(depth):
    grads = []
    for with_cp in (False, True):
        torch.manual_seed(0)
        backbone = shuffle(GatedResNetV1c(depth=depth, with_cp=with_cp))
        backbone.train()
        torch.manual_seed(1)
        (backbone(IMAGES)[-1].mean() + gate_loss(backbone)).backward()
        grads.append({name: p.grad for name, p in backbone.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)
    assert all(grads[0][f'{name}.fc2.weight'].abs().sum() > 0 for name, _ in gates(backbone))


def test_frozen_stages_and_norm_eval():
    backbone = GatedResNet(depth=18, frozen_stages=1, norm_eval=True)
    backbone.train()
    assert not backbone.layer1[0].gate1.training and backbone.layer2[0].gate1.training
    assert not backbone.layer2[0].gate1.bn.training
    assert not any(p.requires_grad for p in backbone.layer1.parameters())
    backbone(IMAGES)
    gate_loss(backbone).backward()
    assert backbone.layer2[0].gate1.fc2.weight.grad is not None


@pytest.mark.parametrize('cls', [GatedResNet, GatedResNeXt])
def test_initialisation(cls):
    backbone = cls(depth=50)
    backbone.init_weights()
    for block in backbone.layer1:
        assert (block.norm3.weight == 0).all()  # as in mmseg's own blocks
        torch.testing.assert_close(block.gate1.fc2.bias, torch.full((64,), 0.405))


def test_copies_and_pickles_after_a_step():
    backbone = GatedResNet(depth=18)
    backbone(IMAGES)[-1].sum().backward()
    for copied in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone))):
        copied.eval()
        backbone.eval()
        with torch.no_grad(), force_gates(copied, 'closed'):
            closed = copied(IMAGES)[-1]
        with torch.no_grad():
            assert not torch.equal(backbone(IMAGES)[-1], closed)  # the copy masks by its own gates


# Attributes of a runner
LENGTH = dict(max_iters=100, max_epochs=10, logger=logging.getLogger('runner'))


def schedule_hook(loss_name: str, schedule: str, begin: float, end: float, **kwargs):
    cfg = dict(type='GateLossScheduleHook', loss_name=loss_name, schedule=schedule, begin=begin, end=end, **kwargs)
    return HOOKS.build(cfg)


@pytest.mark.parametrize('build, message', [
    (lambda: GatedResNet(depth=18, gate_cfg=dict(hiden=8)), 'no keys but hidden_channels.*got hiden'),
    (lambda: GatedResNet(depth=18, gated_maps=(2,)), r'gated_maps of this block must be one or more of \(1,\), got'),
    (lambda: MODELS.build(dict(type='BatchShapingLoss', loss_weight=-1)), 'loss_weight must be a number >= 0, got -1'),
    (lambda: MODELS.build(dict(type='L0Loss', reduction='none')), "'none'"),
    (lambda: MODELS.build(dict(type='L0Loss', loss_name='l0')), "loss_name must contain 'loss'"),
    (lambda: schedule_hook('x', 'cosine', 0, 1), 'cosine'),
    (lambda: schedule_hook('x', 'linear_anneal', 2, 1), 'start 2 and end 1'),
    (lambda: HOOKS.build(dict(type='GateStatisticsHook', threshold=1.5)), 'threshold .* got 1.5'),
])
def test_bad_options(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize('cls', [GatedResNet, SlimResNet])
@pytest.mark.parametrize('theirs, ours, message', [
    (18, 34, '2-2-2-2 blocks.*3-4-6-3'), (34, 50, '2 convolutions.*3'), (50, 34, '3 convolutions.*2')])
def test_checkpoint_of_another_depth(cls, theirs, ours, message, caplog):
    """mmengine would load what fits."""
    narrow = dict(base_channels=4, stem_channels=4)
    with pytest.raises(ValueError, match=f'^the checkpoint is of another depth.*{message}'):
        mmengine.runner.checkpoint.load_state_dict(cls(ours, **narrow), ResNet(theirs, **narrow).state_dict())
    assert 'fresh initialisation' not in caplog.text


@pytest.mark.parametrize('cls', [GatedResNet, SlimResNet])
def test_checkpoint_of_more_stages(cls):
    """As mmseg's own backbones load it."""
    narrow = dict(base_channels=4, stem_channels=4)
    dense = ResNet(18, **narrow)
    backbone = cls(18, num_stages=2, strides=(1, 2), dilations=(1, 1), out_indices=(1,), **narrow)
    mmengine.runner.checkpoint.load_state_dict(backbone, dense.state_dict())
    assert torch.equal(backbone.layer2[1].conv2.weight, dense.layer2[1].conv2.weight)


def test_batch_of_one_trains():
    backbone = GatedResNet(depth=18)
    backbone.train()
    assert all(f.isfinite().all() for f in backbone(images(1, 3, 64, 64)))


def gated_segmentor(**kwargs):
    return segmentor(**{'backbone': dict(type='GatedResNet', depth=18), 'in_channels': 512, **kwargs})


@pytest.mark.parametrize('backbone', [
    dict(type='GatedResNet', depth=18),
    dict(
        type='TIMMBackbone', model_name='gated_resnet18', features_only=True, pretrained=False,
        out_indices=(1, 2, 3, 4)),
])
def test_losses_reach_the_total(backbone):
    model = gated_segmentor(backbone=backbone, gate_losses=LOSSES)
    model.train()
    losses = model.loss(IMAGES, samples(2, 64))
    logits = gate_logits(model)
    torch.testing.assert_close(losses['loss_batch_shaping'], 0.2 * batch_shaping_loss(logits.sigmoid()))
    torch.testing.assert_close(losses['loss_l0'], 0.1 * l0_loss(logits))
    assert losses['weight_batch_shaping'] == pytest.approx(0.2) and 0 < losses['gate_density'] < 1
    total, log = model.parse_losses(losses)
    torch.testing.assert_close(total, losses['decode.loss_ce'] + losses['loss_batch_shaping'] + losses['loss_l0'])
    assert 'gate_density_eval' in log
    total.backward()
    assert all(gate.fc2.bias.grad.abs().sum() > 0 for _, gate in gates(model))


def test_cascade():
    ocr_head = dict(
        type='OCRHead', in_channels=512, in_index=3, channels=16, ocr_channels=8, num_classes=5,
        norm_cfg=dict(type='BN'), loss_decode=dict(type='CrossEntropyLoss'))
    model = gated_segmentor(
        type='GatedCascadeEncoderDecoder', num_stages=2, gate_losses=LOSSES, decode_head=[fcn_head(512), ocr_head])
    assert {'loss_batch_shaping', 'loss_l0', 'decode_1.loss_ce'} <= set(model.loss(IMAGES, samples(2, 64)))


def test_feature_shaping_from_a_config():
    loss = dict(type='FeatureShapingLoss', priors={'backbone.layer3': 'normal'}, loss_weight=0.5)
    model = gated_segmentor(gate_losses=[loss])
    losses = model.loss(IMAGES, samples(2, 64))
    assert losses['loss_feature_shaping'].requires_grad and losses['loss_feature_shaping'] > 0
    with pytest.raises(ValueError, match='layer9'):
        gated_segmentor(gate_losses=[dict(type='FeatureShapingLoss', priors={'backbone.layer9': 'normal'})])


def test_two_losses_with_one_name():
    with pytest.raises(ValueError, match='differ in loss_name'):
        gated_segmentor(gate_losses=[dict(type='L0Loss'), dict(type='L0Loss')])


def test_inference_costs_no_losses(monkeypatch):
    model = gated_segmentor(gate_losses=LOSSES)
    model.eval()
    for loss in model.gate_losses:
        monkeypatch.setattr(loss, 'forward', None)
    with torch.no_grad():
        model.predict(IMAGES, samples(2, 64))


def test_schedule_hook():
    model = gated_segmentor(gate_losses=LOSSES)
    hook = schedule_hook('loss_l0', 'linear_warmup', 10, 20)
    runner = SimpleNamespace(model=model, iter=0, epoch=0, **LENGTH)
    hook.before_train(runner)
    weights = []
    for runner.iter in (0, 10, 15, 20, 100):
        hook.before_train_iter(runner, 0)
        weights.append(model.gate_losses[1].loss_weight)
    assert weights == pytest.approx([0., 0., 0.05, 0.1, 0.1]) and model.gate_losses[0].loss_weight == 0.2

    by_epoch = schedule_hook('loss_batch_shaping', 'linear_anneal', 0, 4, by_epoch=True)
    by_epoch.before_train(runner)
    runner.epoch = 1
    by_epoch.before_train_iter(runner, 0)
    assert model.gate_losses[0].loss_weight == pytest.approx(0.15)


def test_schedule_of_an_unknown_loss():
    hook = schedule_hook('loss_x', 'linear_anneal', 0, 1)
    with pytest.raises(ValueError, match='loss_x.*it has: loss_batch_shaping, loss_l0'):
        hook.before_train(SimpleNamespace(model=gated_segmentor(gate_losses=LOSSES), **LENGTH))


@pytest.mark.parametrize('begin, warned', [(98, False), (99, True), (100, True), (300, True)])
def test_schedule_of_a_loss_that_never_begins(begin, warned, caplog):
    caplog.set_level(logging.INFO)
    hook = schedule_hook('loss_l0', 'linear_warmup', begin, 400)
    hook.before_train(SimpleNamespace(model=gated_segmentor(gate_losses=LOSSES), **LENGTH))
    assert f'loss_l0: loss_weight 0 to 0.1 over iterations {begin} to 400 of 100' in caplog.text
    assert ('loss_l0 will never be active' in caplog.text) == warned


def test_schedule_by_epoch_in_an_iteration_based_loop():
    """The epoch of an iteration-based loop stays 0, and so would the progress of the schedule."""
    hook = schedule_hook('loss_l0', 'linear_warmup', 0, 4, by_epoch=True)
    loop = IterBasedTrainLoop(SimpleNamespace(visualizer=SimpleNamespace()), DataLoader([0]), max_iters=100)
    with pytest.raises(ValueError, match="'loss_l0' has by_epoch=True, but the training loop is iteration-based"):
        hook.before_train(SimpleNamespace(model=gated_segmentor(gate_losses=LOSSES), train_loop=loop, **LENGTH))


def test_statistics_hook():
    model = gated_segmentor()
    hook = HOOKS.build(dict(type='GateStatisticsHook'))
    logged, shown = [], {}
    runner = SimpleNamespace(
        model=model, iter=7, logger=SimpleNamespace(info=logged.append),
        val_loop=SimpleNamespace(dataloader=SimpleNamespace(dataset=range(2))),
        visualizer=SimpleNamespace(add_scalars=lambda scalars, step: shown.update(scalars, step=step)))
    model.eval()
    hook.before_val_epoch(runner)
    half = torch.arange(512) < 128
    masks = {name: torch.zeros(gate.num_gates) for name, gate in gates(model)}
    masks['backbone.layer4.0.gate1'] = half
    masks['backbone.layer4.1.gate1'] = torch.stack((half, ~half))
    with torch.no_grad(), force_gates(model, masks):
        model.predict(IMAGES, samples(2, 64))
    hook.after_val_iter(runner, 0)
    hook.after_val_epoch(runner)
    assert shown['gates/layer1/always_off'] == 1 and shown['gates/layer4/conditional'] == 0.5
    assert shown['gates/layer4/always_on'] == 0.125 and shown['gates/layer4/always_off'] == 0.375
    assert shown['gates/layer4/density'] == pytest.approx((0.25 + 0.5) / 2) and shown['step'] == 7
    assert 'gates/layer4/conditional: 0.5000' in logged[0]
    with pytest.raises(ValueError, match='needs a model with gates'):
        hook.before_val_epoch(SimpleNamespace(model=ResNet(depth=18)))


@pytest.mark.parametrize('cls, depth, kwargs, timm_kwargs', [
    (GatedResNet, 50, D8, dict(output_stride=8)),
    (GatedResNet, 18, dict(deep_stem=True, avg_down=True), dict(stem_type='deep', stem_width=32, avg_down=True)),
    (GatedResNeXt, 50, X32, dict(cardinality=32, base_width=4)),
])
def test_weights_travel_between_timm_and_mmseg(cls, depth, kwargs, timm_kwargs):
    there = shuffle(timm.create_model(
        f'gated_resnet{depth}', features_only=False, num_classes=3, **timm_kwargs)).eval()
    here = cls(depth=depth, **kwargs)
    here.load_state_dict(timm_to_mmseg(there.state_dict()))
    here.eval()
    with torch.no_grad():
        _, features = there.forward_intermediates(IMAGES)
        for ours, theirs in zip(here(IMAGES), features[1:], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    back = mmseg_to_timm({f'backbone.{k}': v for k, v in here.state_dict().items()} | {'decode_head.x': torch.zeros(1)})
    expected = {k: v for k, v in there.state_dict().items() if not k.startswith('fc.')}
    assert back.keys() == expected.keys() and all(torch.equal(back[k], v) for k, v in expected.items())


def test_convert_tool(tmp_path, capsys):
    model = timm.create_model('gated_resnet18', num_classes=3, channels=(16, 16, 16, 16))
    there, here, back = (tmp_path / name for name in ('timm.pth', 'backbone.pth', 'back.safetensors'))
    torch.save({'state_dict': model.state_dict()}, there)
    assert run_tool('convert_checkpoint', '--to', 'mmseg', there, here) == 0
    assert run_tool('convert_checkpoint', '--to', 'timm', here, back) == 0
    converted = safetensors.torch.load_file(back)
    expected = {k: v for k, v in model.state_dict().items() if not k.startswith('fc.')}
    assert converted.keys() == expected.keys() and all(torch.equal(converted[k], v) for k, v in expected.items())
    assert run_tool('convert_checkpoint', '--to', 'mmseg', there, here) == 2
    assert 'backbone.pth exists' in capsys.readouterr().err


def test_error_of_a_compiled_operator():
    assert stand_in_for_compiled_ops()  # mmcv-lite is installed
    from mmcv.ops import nms
    with pytest.raises(RuntimeError, match='mim install'):
        nms(torch.rand(2, 4), torch.rand(2), 0.5)


def test_full_mmcv_is_not_replaced(monkeypatch):
    monkeypatch.delitem(sys.modules, 'mmcv._ext')
    monkeypatch.setattr('importlib.util.find_spec', lambda name: object())
    assert not stand_in_for_compiled_ops() and 'mmcv._ext' not in sys.modules
