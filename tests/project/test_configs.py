"""Every YAML of configs/timm builds its model, losses and schedules, and has the paper's recipe"""
import re
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch
import yaml
from nets import family
from paths import ROOT
from timm.data import create_transform
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torchvision import transforms

from timm_gated import GateLosses, gates

FOLDER = ROOT / 'configs' / 'timm'
ALL = sorted(FOLDER.glob('*/*.yaml'))
FROM_DENSE = [path for path in ALL if path.stem.endswith('_from_dense')]
CONFIGS = [path for path in ALL if path not in FROM_DENSE]  # the papers' recipes

# Recipes of the gating paper, also used for the dense networks, and of the baselines
PAPER = {
    'cifar10': dict(epochs=500, drops=(300, 375, 450), weight_decay=5e-4, lam_ends=100, gamma_ramps=(100, 300)),
    'imagenet': dict(epochs=150, drops=(60, 90, 120), weight_decay=1e-4, lam_ends=20, gamma_ramps=(30, 60)),
}
BASELINES = {
    'convnet_aig': {
        'cifar10': dict(epochs=350, drops=(150, 250), weight_decay=5e-4, nesterov=False),
        'imagenet': dict(epochs=100, drops=(30, 60, 90), weight_decay=1e-4, nesterov=False),
    },
    'skipnet': {
        'cifar10': dict(epochs=164, drops=(82, 123), weight_decay=1e-4, nesterov=False, batch_size=128),
        'imagenet': dict(epochs=120, drops=(30, 60, 90), weight_decay=1e-4, nesterov=False),
    },
    'skipnet_hybrid': {
        'cifar10': dict(epochs=26, drops=(), weight_decay=1e-4, nesterov=False, batch_size=128, lr=1e-4),
        'imagenet': dict(epochs=40, drops=(30,), weight_decay=1e-4, nesterov=False, lr=1e-4),
    },
    'dgnet': PAPER,
    'fbs': PAPER,
    'gaternet': PAPER,
}


def load(path: Path) -> Namespace:
    return Namespace(**yaml.safe_load(path.read_text()))


KEYS = {
    'model', 'input_size', 'num_classes', 'crop_pct', 'scale', 'hflip', 'interpolation', 'train_interpolation',
    'epochs', 'batch_size', 'opt', 'momentum', 'lr', 'sched', 'decay_milestones', 'decay_rate', 'weight_decay',
    'opt_kwargs', 'warmup_epochs', 'smoothing', 'color_jitter'}
DATA = {
    'cifar10': dict(input_size=[3, 32, 32], num_classes=10, crop_pct=1., scale=[0.64, 0.64], ratio=[1., 1.], hflip=0.5),
    'imagenet': dict(input_size=[3, 224, 224], num_classes=1000, crop_pct=0.875, scale=[0.08, 1.], hflip=0.5),
}


@pytest.fixture(params=CONFIGS, ids=lambda path: f'{path.parent.name}/{path.stem}')
def config(request):
    return request.param


def test_recipe(config):
    cfg = load(config)
    stage = '_hybrid' if config.stem.endswith('_hybrid') else ''
    paper = BASELINES.get(family(cfg.model) + stage, PAPER)[config.parent.name]
    model = timm.create_model(cfg.model, num_classes=cfg.num_classes, **getattr(cfg, 'model_kwargs', {}))
    optimizer = create_optimizer_v2(
        model, opt=cfg.opt, lr=cfg.lr, weight_decay=cfg.weight_decay, momentum=cfg.momentum, **cfg.opt_kwargs)
    assert isinstance(optimizer, torch.optim.SGD)
    assert {group['nesterov'] for group in optimizer.param_groups} == {paper.get('nesterov', True)}

    decayed = {id(p) for group in optimizer.param_groups if group['weight_decay'] for p in group['params']}
    gate_parameters = {id(p) for _, gate in gates(model) for p in gate.parameters()}
    assert decayed == {id(p) for p in model.parameters()} - gate_parameters
    assert cfg.weight_decay == paper['weight_decay'] and cfg.momentum == 0.9
    assert cfg.batch_size == paper.get('batch_size', 256)

    scheduler, epochs = create_scheduler_v2(
        optimizer, sched=cfg.sched, num_epochs=cfg.epochs, decay_milestones=cfg.decay_milestones,
        decay_rate=cfg.decay_rate, warmup_epochs=cfg.warmup_epochs)
    assert epochs == paper['epochs']
    rates = []
    for epoch in range(epochs):
        scheduler.step(epoch)
        rates.append(optimizer.param_groups[0]['lr'])
    drops = [sum(epoch >= drop for drop in paper['drops']) for epoch in range(epochs)]
    assert rates == pytest.approx([paper.get('lr', 0.1) * 0.1 ** drop for drop in drops])

    # train.py accepts any key of a YAML, including misspelt ones
    optional = {'device_modules', 'model_kwargs'} | (DATA[config.parent.name].keys() - KEYS)
    assert KEYS <= vars(cfg).keys() <= KEYS | optional
    assert {key: getattr(cfg, key) for key in DATA[config.parent.name]} == DATA[config.parent.name]
    # the paper differs from timm's defaults
    assert (cfg.smoothing, cfg.color_jitter, cfg.warmup_epochs, cfg.train_interpolation) == (0, 0, 0, 'bilinear')
    assert getattr(cfg, 'device_modules', None) == (['timm_gated'] if gates(model) or 'cifar' in cfg.model else None)


@pytest.mark.parametrize('path', FROM_DENSE, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_recipe_from_dense(path):
    cfg, text, cifar = load(path), path.read_text(), path.parent.name == 'cifar10'
    # without pretrained=True: the ImageNet weights are on the hub, which tests do not use
    model = timm.create_model(cfg.model, num_classes=cfg.num_classes, **getattr(cfg, 'model_kwargs', {}))
    teacher = timm.create_model(cfg.kd_model_name, num_classes=cfg.num_classes)
    weights = [(net.pretrained_cfg.get('file'), net.pretrained_cfg.get('hf_hub_id')) for net in (model, teacher)]
    assert cfg.pretrained and any(weights[0]) and weights[0] == weights[1] and not gates(teacher)

    # one schedule per data set; all else as in the papers' recipes
    schedule = ('epochs', 'batch_size', 'lr', 'sched', 'sched_on_updates', 'min_lr', 'opt', 'momentum', 'weight_decay')
    assert [getattr(cfg, key) for key in schedule] == (
        [20, 128, 0.05, 'cosine', True, 0, 'sgd', 0.9, 5e-4] if cifar else
        [8, 256, 0.02, 'cosine', True, 0, 'sgd', 0.9, 1e-4])
    base = vars(load(FOLDER / ('cifar10/cifar_resnet20.yaml' if cifar else 'imagenet/gated_resnet34.yaml')))
    start = ('model', 'model_kwargs', 'pretrained', 'kd_model_name', 'kd_temperature')
    others = {k: v for k, v in vars(cfg).items() if k not in (*schedule, *start)}
    assert others == {k: base[k] for k in others}
    assert base.keys() - {'decay_milestones', 'decay_rate'} <= vars(cfg).keys() | {'model_kwargs'}

    losses, epochs = getattr(model, 'gate_losses', None), cfg.epochs
    if isinstance(losses, GateLosses):
        assert cfg.model_kwargs['from_dense'] == epochs
        lam, gamma = cfg.model_kwargs.get('lam', 0.003), cfg.model_kwargs.get('gamma', 0.)
        assert losses.weights(0) == (lam, 0.) and losses.weights(epochs / 4) == (lam / 2, gamma)
        assert losses.weights(epochs / 2) == losses.weights(epochs - 1) == (0., gamma)
        assert bool(gamma) != hasattr(model, 'mac_budget')
        assert not lam or f'lambda ({lam}, summed over' in text
        assert losses.noise_epochs == (0, 5 * epochs / 8) and 'five eighths' in text
        assert all((gate.fc2.bias == 2).all() for _, gate in gates(model))


ABLATIONS = {
    'gated_resnet20_before_relu': {'gate_before_act'},
    'gated_resnet20_all_maps': {'gated_maps'},
    'gated_resnet20_sparser_prior': {'prior_end', 'prior_epochs'},
}


def test_losses(config):
    cfg, paper = load(config), PAPER[config.parent.name]
    model = timm.create_model(cfg.model, **getattr(cfg, 'model_kwargs', {}))
    if not isinstance(getattr(model, 'gate_losses', None), GateLosses):
        assert not gates(model) or family(cfg.model) in BASELINES
        return
    last = paper['epochs'] - 1
    first_ramped, ramped = paper['gamma_ramps']
    weights = model.gate_losses.weights
    # the reduction is stated wherever lambda or gamma is
    text = config.read_text()
    assert model.gate_losses.lam_reduction == 'sum' and model.gate_losses.gamma_reduction == 'mean'
    assert 'summed over gates' in text or config.stem.endswith('_l0')
    assert 'mean over gates' in text or config.stem.endswith('_bs')
    if config.stem.endswith('_bs'):
        assert weights(0) == weights(last) == (0.75, 0.)
    elif config.stem.endswith('_l0'):
        assert weights(0) == (0., 0.) and weights(ramped) == weights(last) == (0., cfg.model_kwargs['gamma'])
    else:
        assert weights(0) == (0.75, 0.) and weights(paper['lam_ends'] / 2) == (0.375, 0.)
        assert weights(paper['lam_ends']) == weights(first_ramped) == (0., 0.)
        assert weights(ramped) == weights(last) == (0., cfg.model_kwargs['gamma'])
        # --model-kwargs gamma=… replaces all of model_kwargs and must lose nothing, so only gamma is set: the length of
        # the schedule is the default.
        assert set(cfg.model_kwargs) == {'gamma', 'schedule_epochs', *ABLATIONS.get(config.stem, ())}
        assert cfg.model_kwargs['schedule_epochs'] == cfg.epochs


AIG = [path for path in CONFIGS if family(path.stem) == 'convnet_aig']


@pytest.mark.parametrize('path', AIG, ids=lambda path: path.stem)
def test_target_rates(path):
    cfg = load(path)
    losses = timm.create_model(cfg.model, **cfg.model_kwargs).gate_losses
    default = timm.create_model(cfg.model).gate_losses
    assert (losses.target_rate, losses.target_weight) == (default.target_rate, default.target_weight)
    assert f'weight {losses.target_weight:.0f}, mean over blocks' in path.read_text()
    assert set(cfg.model_kwargs) == {'target_rate'}  # --model-kwargs target_rate=… loses nothing


@pytest.mark.parametrize('path', sorted(FOLDER.glob('*/skipnet_*.yaml')), ids=lambda path: path.stem)
def test_stages(path):
    cfg, hybrid = load(path), path.stem.endswith('_hybrid')
    losses, default = (timm.create_model(cfg.model, device='meta', **k).gate_losses for k in (cfg.model_kwargs, {}))
    assert (losses.stage, losses.alpha) == ('hybrid' if hybrid else 'supervised', default.alpha)
    assert set(cfg.model_kwargs) == ({'stage', 'alpha'} if hybrid else {'gate'})  # the text says to repeat them
    assert path.stem == cfg.model + '_hybrid' * hybrid


# Other baselines: attribute of the model with the objective, the option that a config sets, and its description there
STATED = {
    'dgnet': ('mac_budget', 'budget', r'weight 10 \(ours\)'),
    'fbs': ('gate_losses', 'density', r'L1 on the\n# saliencies, weight 1e-8'),
    'gaternet': ('gate_losses', 'sparsity_weight', 'mean\n# over gates'),
}


@pytest.mark.parametrize('path', [path for path in CONFIGS if family(path.stem) in STATED], ids=lambda path: path.stem)
def test_options_of_baselines(path):
    cfg, (objective, option, text) = load(path), STATED[family(path.stem)]
    value, default = (
        getattr(getattr(timm.create_model(cfg.model, device='meta', **kwargs), objective), option)
        for kwargs in (cfg.model_kwargs, {}))
    # --model-kwargs replaces all of them and must lose nothing
    assert set(cfg.model_kwargs) - {'schedule_epochs'} == {option}
    assert cfg.model_kwargs.get('schedule_epochs', cfg.epochs) == cfg.epochs
    assert value == default == cfg.model_kwargs[option] and path.stem == cfg.model
    assert re.search(text, path.read_text())


@pytest.mark.parametrize('name', ['cifar10/gated_resnet20.yaml', 'cifar10/cifar_resnet20.yaml'])
def test_cifar_augmentation_is_pad_4_crop_and_flip(name):
    cfg = load(FOLDER / name)
    transform = create_transform(
        tuple(cfg.input_size), is_training=True, scale=cfg.scale, ratio=cfg.ratio, hflip=cfg.hflip,
        color_jitter=cfg.color_jitter, interpolation=cfg.train_interpolation)
    padded = torch.zeros(3, 40, 40, dtype=torch.uint8)
    padded[:, 4:36, 4:36] = torch.arange(32 * 32).view(32, 32) % 251
    image = transforms.ToPILImage()(padded)
    crop_and_flip = transform.transforms[:2]
    inert = [type(step).__name__ for step in transform.transforms[2:]]
    assert inert == ['ColorJitter', 'MaybeToTensor', 'Normalize'] and transform.transforms[2].brightness is None, inert
    windows = padded.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4).reshape(81, 3, 32, 32)
    windows = torch.cat((windows, windows.flip(-1)))
    seen = set()
    for _ in range(400):
        augmented = image
        for step in crop_and_flip:
            augmented = step(augmented)
        same = (windows == transforms.PILToTensor()(augmented)).flatten(1).all(1).nonzero()
        assert len(same) >= 1
        seen.add(int(same[0]))
    assert len(seen) > 120  # of 162
