"""Gating a trained segmentor: the MAC budget, distillation, and the schedule of the gate noise"""
import copy
import logging
from types import SimpleNamespace
from typing import Any

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config, ConfigDict
from mmengine.runner import IterBasedTrainLoop
from mmseg.registry import HOOKS, MODELS
from mmseg_small import TINY, tiny_samples
from torch.utils.data import DataLoader

from mmseg_plugin.distillation import pixel_distillation_loss
from timm_gated import ChannelGate, force_gates, gates
from timm_gated.layers import MacCounter

BUDGET = dict(type='MACBudgetLoss', budget=0.5, loss_weight=2.)


@pytest.fixture
def teacher(tmp_path):
    """Config and checkpoint of the dense segmentor, and the segmentor itself."""
    cfg = copy.deepcopy(TINY)
    cfg['backbone']['model_name'] = 'cifar_resnet20'
    cfg.update(gate_losses=[], data_preprocessor=dict(type='mmseg.SegDataPreProcessor', mean=[0.] * 3, std=[1.] * 3))
    config = Config(dict(model=cfg))
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'dense.pth')
    return SimpleNamespace(config=config, checkpoint=str(tmp_path / 'dense.pth'), model=model.eval())


def student(*losses: Any, **kwargs: Any) -> Any:
    cfg = copy.deepcopy(TINY)
    cfg.update(
        gate_losses=list(losses),
        data_preprocessor=dict(type='mmseg.SegDataPreProcessor', mean=[0.] * 3, std=[1.] * 3), **kwargs)
    return MODELS.build(cfg)


def batch(count: int = 4) -> Any:
    samples = tiny_samples(count)
    return torch.stack([sample['inputs'] for sample in samples]), [sample['data_samples'] for sample in samples]


def test_pixel_distillation_against_its_definition():
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 5, 3, 4, dtype=torch.float64), torch.randn(2, 5, 3, 4, dtype=torch.float64)
    p, q = (theirs / 2).softmax(1), (ours / 2).softmax(1)
    expected = 4 * (p * (p / q).log()).sum() / (2 * 3 * 4)
    torch.testing.assert_close(pixel_distillation_loss(ours, theirs, temperature=2.), expected)
    assert pixel_distillation_loss(ours, ours + 3.).abs() < 1e-12
    resized = F.interpolate(theirs, (6, 8), mode='bilinear', align_corners=False)
    larger = F.interpolate(ours, (6, 8))
    torch.testing.assert_close(pixel_distillation_loss(larger, theirs), pixel_distillation_loss(larger, resized))
    assert torch.autograd.gradcheck(pixel_distillation_loss, (ours.requires_grad_(), theirs))


def test_budget_counts_the_segmentor_with_its_head():
    model = student(BUDGET).train()
    images, samples = batch()
    with MacCounter(model) as counter:
        losses = model.loss(images, samples)
    share = counter.macs().per_sample.double().mean() / counter.macs().dense
    torch.testing.assert_close(losses['macs_share'].double(), share, rtol=1e-5, atol=0.)
    torch.testing.assert_close(losses['loss_mac_budget'].double(), 2. * (share - 0.5) ** 2, rtol=1e-4, atol=0.)
    head = sum(macs.dense for name, macs in counter.macs().by_module.items() if name.startswith('decode_head'))
    assert head > 0 and 'macs_share' not in model.parse_losses({'loss_mac_budget': losses['loss_mac_budget']})[1]
    losses['loss_mac_budget'].backward()
    assert all(gate.fc2.bias.grad.abs().sum() > 0 for _, gate in gates(model))


def test_open_gates_have_learned_from_the_teacher(teacher):
    """Equal logits: the loss compares the decode heads of both networks on the same images."""
    distillation = dict(
        type='DistillationLoss', teacher_config=teacher.config, teacher_ckpt=teacher.checkpoint, temperature=2.)
    model = student(distillation)
    model.load_state_dict(teacher.model.state_dict(), strict=False)
    model.eval()
    images, samples = batch()
    with force_gates(model, 'open'):
        assert model.loss(images, samples)['loss_distillation'].abs() < 1e-9
    with force_gates(model, 'closed'):
        losses = model.loss(images, samples)
    with torch.no_grad(), force_gates(model, 'closed'):
        expected = pixel_distillation_loss(model(images), teacher.model(images), 2.)
    assert expected > 1e-3
    torch.testing.assert_close(losses['loss_distillation'], expected)
    losses['loss_distillation'].backward()
    assert model.decode_head.conv_seg.weight.grad.abs().sum() > 0
    assert not model.decode_head.conv_seg._forward_hooks


def test_the_teacher_is_no_part_of_the_model(teacher):
    distillation = dict(type='DistillationLoss', teacher_config=teacher.config, teacher_ckpt=teacher.checkpoint)
    model = student(distillation)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train().loss(*batch())
    found = model.gate_losses[0]._teacher.module
    assert found is not None and not found.training
    assert set(model.state_dict()) == set(before) and not any('teacher' in name for name in before)
    average = copy.deepcopy(model)  # as an EMA hook does
    assert average.gate_losses[0]._teacher.module is found
    model.train()
    assert not found.training


def test_evaluation_needs_no_teacher():
    distillation = dict(type='DistillationLoss', teacher_config='missing.py', teacher_ckpt='missing.pth')
    model = student(distillation, test_cfg=ConfigDict(mode='whole')).eval()
    images, samples = batch()
    for sample in samples:
        sample.set_metainfo(dict(ori_shape=(16, 16), pad_shape=(16, 16), padding_size=[0] * 4))
    with torch.no_grad():
        model.predict(images, samples)
    with pytest.raises(FileNotFoundError, match='missing.py'):
        model.loss(images, samples)


def test_teachers_that_do_not_fit(teacher):
    def loss(**changes: Any) -> Any:
        config = copy.deepcopy(teacher.config)
        config.merge_from_dict(changes)
        return dict(type='DistillationLoss', teacher_config=config, teacher_ckpt=teacher.checkpoint)

    with pytest.raises(ValueError, match='does not load into the model of teacher_config'):
        student(loss(**{'model.backbone.layers': (1, 1, 2)})).loss(*batch())
    with pytest.raises(ValueError, match=r'normalise images as the student does.*\[0.5, 0.5, 0.5\]'):
        student(loss(**{'model.data_preprocessor.mean': [0.5] * 3})).loss(*batch())
    classes = student(loss())
    classes.decode_head.out_channels = 7
    with pytest.raises(ValueError, match='classes of the student, got 5 and 7'):
        classes.loss(*batch())
    with pytest.raises(ValueError, match='temperature'):
        MODELS.build(dict(type='DistillationLoss', teacher_config='a.py', teacher_ckpt='a.pth', temperature=0))


def test_noise_schedule():
    model = student(BUDGET)
    hook = HOOKS.build(dict(type='GateNoiseScheduleHook', begin=10, end=20))
    runner = SimpleNamespace(model=model, iter=0, epoch=0, logger=logging.getLogger('runner'))
    hook.before_train(runner)
    scales = []
    for runner.iter in (0, 10, 15, 20, 30):
        hook.before_train_iter(runner, 0)
        scales.append({float(gate.noise) for _, gate in gates(model) if isinstance(gate, ChannelGate)})
    assert scales == [{1.}, {1.}, {0.5}, {0.}, {0.}]
    loop = IterBasedTrainLoop(SimpleNamespace(visualizer=SimpleNamespace()), DataLoader([0]), max_iters=100)
    by_epoch = HOOKS.build(dict(type='GateNoiseScheduleHook', begin=0, end=4, by_epoch=True))
    with pytest.raises(ValueError, match='schedule of the gate noise has by_epoch=True'):
        by_epoch.before_train(SimpleNamespace(model=model, train_loop=loop))
