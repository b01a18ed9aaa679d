"""`timm_gated.gate`: a trained timm ResNet with gates, and models that it refuses"""
import pytest
import timm
import torch
import torch.nn as nn
from models import create, images
from nets import gating_keys
from timm.models import resume_checkpoint
from timm.models.resnet import BasicBlock, ResNet
from timm.task import ClassificationTask
from timm.utils import CheckpointSaver, freeze

from timm_gated import force_gates, gate, gates, save_pretrained

TINY = dict(layers=(1, 1, 1, 1), channels=(16, 32, 64, 128))
MODELS = [
    ('resnet50d', {}),
    ('resnet18', dict(num_classes=7, in_chans=1, global_pool='max', drop_rate=0.1, drop_path_rate=0.2)),
    ('resnext50_32x4d', dict(num_classes=0, output_stride=8)),
    ('seresnet18', dict(act_layer='silu', drop_block_rate=0.1, zero_init_last=False)),
    ('resnetblur50', dict(global_pool='catavgmax', num_classes=3)),
    ('resnetrs50', dict(features_only=True, out_indices=(1, 3))),
    ('resnet10t', dict(features_only=True, feature_cls='getter', in_chans=4)),
    ('resnet18', dict(features_only=True, feature_cls='dict', out_indices=(2, 4))),
    ('resnet18', dict(features_only=True, feature_cls='hook', out_indices=(2, 4))),
    ('slim_resnet26', dict(inner_channels={'layer1.0': [3, 9]})),
]


def outputs(model: nn.Module, x: torch.Tensor) -> list:
    with torch.no_grad():
        out = model.eval()(x)
    return [out] if isinstance(out, torch.Tensor) else [*(out.values() if isinstance(out, dict) else out)]


@pytest.mark.parametrize('name, kwargs', MODELS)
def test_weights_and_arguments_are_kept(name, kwargs, caplog):
    model = create(name, **{**TINY, **kwargs})
    before, x = {k: v.clone() for k, v in model.state_dict().items()}, images(64, in_chans=kwargs.get('in_chans', 3))
    gated = gate(model, budget=0.7)
    assert 'checkpoint' not in caplog.text
    own = gated.state_dict()
    assert all(torch.equal(own[key], value) for key, value in before.items())
    assert set(own) - set(before) == gating_keys(gated) and gates(gated)
    assert all((g.fc2.bias == 2).all() for _, g in gates(gated))
    assert gated.training and model.training
    assert gated.pretrained_cfg['architecture'] == f'gated_{name.removeprefix("slim_")}'
    expected = outputs(model, x)
    with force_gates(gated, 'open'):
        for ours, theirs in zip(outputs(gated, x), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    again = timm.create_model(gated.pretrained_cfg['architecture'], **gated._model_args)  # by name
    again.load_state_dict(own)
    for ours, theirs in zip(outputs(again, x), outputs(gated, x), strict=True):
        assert torch.equal(ours, theirs)


def test_options():
    model = create('resnet18', **TINY)
    gated = gate(model, budget=0.7, gate_bias=3., gamma=0.1)
    assert gated.mac_budget.budget == 0.7 and all((g.fc2.bias == 3).all() for _, g in gates(gated))
    assert gated.gate_losses.weights(0) == (0, 0) and gated.gate_losses.weights(100) == (0, 0.1)
    gated = gate(model, from_dense=10)
    assert gated.gate_losses.lam == 0.003 and gated.gate_losses.noise_epochs == (0, 6.25)
    assert not hasattr(gated, 'mac_budget') and not hasattr(gate(model), 'mac_budget')
    assert gate(create('cifar_resnet20', layers=(1, 1, 1))).pretrained_cfg['architecture'] == 'gated_resnet20'


def test_training_saving_and_loading(tmp_path):
    """With timm's task; the folder and the checkpoint load by name."""
    model = create('resnext50_32x4d', num_classes=4, **TINY)
    gated = gate(model, budget=0.5, from_dense=10)
    task = ClassificationTask(gated, nn.CrossEntropyLoss(), verbose=False)
    result = task(images(64, 4), torch.arange(4))
    result['loss'].backward()
    assert result['budget_loss'] > 0 and all(g.fc2.bias.grad.any() for _, g in gates(gated))
    save_pretrained(gated, tmp_path / 'gated')
    torch.save(gated.state_dict(), tmp_path / 'gated.pth')
    saver = CheckpointSaver(gated, torch.optim.SGD(gated.parameters(), 0.1), checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(3)
    expected = outputs(gated, images(64))[0]
    loaded = timm.create_model(f'local-dir:{tmp_path / "gated"}', pretrained=True)
    initial = timm.create_model(
        'gated_resnext50_32x4d', num_classes=4, checkpoint_path=str(tmp_path / 'gated.pth'), **TINY)
    resumed = timm.create_model('gated_resnext50_32x4d', num_classes=4, **TINY)
    assert resume_checkpoint(resumed, str(tmp_path / 'last.pth.tar'), log_info=False) == 4
    for again in (loaded, initial, resumed):
        assert torch.equal(outputs(again, images(64))[0], expected)


def test_state_of_the_model():
    model = create('resnet18', **TINY)
    model.reset_classifier(3, 'max')  # timm records this
    model.bfloat16().to(memory_format=torch.channels_last).conv1.weight.requires_grad_(False)
    model.layer2.eval()
    model.set_grad_checkpointing()
    gated = gate(torch.compile(model, backend='eager'))
    assert gated.grad_checkpointing and gated.fc.out_features == 3
    assert {p.dtype for p in gated.parameters()} == {torch.bfloat16}
    assert [n for n, p in gated.named_parameters() if not p.requires_grad] == ['conv1.weight']
    assert gated.layer1[0].conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert gated.fc.weight.data_ptr() != model.fc.weight.data_ptr()
    in_evaluation = {n for n, m in gated.named_modules() if not m.training}
    assert in_evaluation == {n for n, _ in gated.named_modules() if f'{n}.'.startswith('layer2.')}
    assert 'layer2.0.gate1' in in_evaluation


def test_weights_of_a_tag_keep_their_config():
    model = timm.create_model('resnet10t.c3_in1k')
    cfg = gate(model).pretrained_cfg
    assert {**cfg, 'architecture': 'resnet10t'} == {**model.pretrained_cfg}


def changed(change, name: str = 'resnet18') -> nn.Module:
    model = create(name, **TINY)
    change(model)
    return model


def in_training(module, inputs, output):
    """A hook that changes nothing in evaluation."""
    return 2 * output if module.training else output


def of_class(name: str) -> nn.Module:
    return changed(lambda model: setattr(model, '__class__', type(name, (ResNet,), {})))


@pytest.mark.parametrize('make, message', [
    (lambda: timm.create_model('resnet50_gn', layers=(1, 1, 1, 1)),
     "'layer1.0.bn1' is a GroupNorm.*norm_layer='batchnorm2d'"),
    (lambda: timm.create_model('vit_tiny_patch16_224', depth=1), "no gated variant of 'vit_tiny_patch16_224'"),
    (lambda: timm.create_model('gated_resnet20', layers=(1, 1, 1)), 'GatedCifarResNet is gated already'),
    (lambda: ResNet(BasicBlock, (1, 1, 1, 1)), 'ResNet was not created by timm.create_model'),
    (lambda: nn.Linear(3, 3), 'Linear was not created by timm.create_model'),
    (lambda: of_class('MyResNet'), 'the network is MyResNet, and was ResNet'),
    (lambda: changed(lambda m: setattr(m.layer2[0], '__class__', type('MyBlock', (BasicBlock,), {}))),
     "'layer2.0' is a MyBlock; .*examples/own_block.py"),
    (lambda: changed(lambda m: m.layer1.append(nn.Identity())), "'layer1.1' is a Identity"),
    (lambda: changed(lambda m: setattr(m.fc, 'bias', None)), 'do not fit gated_resnet18: .*Missing.*fc.bias'),
    (lambda: changed(lambda m: setattr(m, 'fc', nn.Linear(128, 3))), "'out_features' of 'fc' is 3, and was 1000"),
    (lambda: changed(lambda m: setattr(m.layer1[0], 'act1', nn.SiLU())), "'layer1.0.act1' is SiLU, and was ReLU"),
    (lambda: changed(lambda m: setattr(m.layer2[0].conv1, 'stride', (1, 1))), "'stride' of 'layer2.0.conv1' is"),
    (lambda: changed(lambda m: setattr(m.layer2[0].bn1, 'eps', 0.1)), "'eps' of 'layer2.0.bn1' is 0.1, and was 1e-05"),
    (lambda: changed(lambda m: m.add_module('neck', nn.Identity())), "'neck' is Identity, and was missing"),
    (lambda: changed(lambda m: m.register_buffer('scale', torch.ones(1))), 'do not fit gated_resnet18: .*scale'),
    (lambda: changed(lambda m: setattr(m.conv1, 'weight', nn.Parameter(torch.zeros(64, 3, 3, 3)))),
     'do not fit gated_resnet18: .*conv1.weight'),
    (lambda: changed(lambda m: m.layer2.register_forward_hook(in_training)),
     "'forward_hooks' of 'layer2' is 1, and was 0"),
    (lambda: changed(lambda m: m.register_full_backward_hook(lambda module, inputs, outputs: None)),
     "'backward_hooks' of the network is 1, and was 0"),
    (lambda: changed(lambda m: setattr(m, 'forward_intermediates', lambda x: [x])),
     "'forward_intermediates' of the network is a function, and was missing"),
    (lambda: changed(lambda m: m.layer2[0].aa.filt.mul_(2), 'resnetblur18'), 'does not give the outputs'),
    (lambda: changed(freeze), "'bn1' is FrozenBatchNorm2d, and was BatchNorm2d"),
    (lambda: create('resnet18', features_only=True, feature_cls='fx', **TINY), "feature_cls='list'"),
    (lambda: changed(lambda m: m.fc.half()), 'one dtype, got torch.float16, torch.float32'),
])
def test_other_models_are_refused(make, message):
    with pytest.raises(ValueError, match=f'(?s){message}'):
        gate(make())


def test_options_that_change_the_network_are_refused():
    with pytest.raises(ValueError, match='(?s)do not fit gated_resnet18: .*fc.weight'):
        gate(create('resnet18', **TINY), num_classes=4)
    with pytest.raises(TypeError, match='gate_biass'):
        gate(create('resnet18', **TINY), gate_biass=4)
