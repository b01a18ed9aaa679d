"""Pruned and specialised segmentors, and mmseg's scripts on the saved results"""
import re

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import numpy as np
import onnxruntime
import pytest
import torch
from forked import run_script
from mmengine.config import Config
from mmseg.registry import MODELS
from mmseg_small import SCRIPTS, write_config
from nets import shuffle
from tool import run_tool

from mmseg_plugin import GatedResNet, GatedResNetV1c, GatedResNetV1d, GatedResNeXt, SlimResNet, SlimResNeXt
from mmseg_plugin.analysis import create_segmentation, load_config
from mmseg_plugin.backbones import backbone_cfg
from mmseg_plugin.pruning import prune_static, pruned_config, specialize
from timm_gated import accelerate, calibrate, gates
from timm_gated.inference.export import export_onnx
from timm_gated.layers.narrow import inner_channels
from timm_gated.pruning.filters import keep_used_filters

TWO_STAGES = dict(num_stages=2, out_indices=(0, 1), strides=(1, 2), dilations=(1, 1))
DILATED = dict(TWO_STAGES, dilations=(1, 2), strides=(1, 1), contract_dilation=True)


@torch.no_grad()
def spread_gates(model: torch.nn.Module) -> torch.nn.Module:
    """Make some gates always off, some always on and some conditional."""
    shuffle(model)
    for _, gate in gates(model):
        gate.fc2.bias.copy_(torch.linspace(-5, 5, gate.num_gates))
    return model


@pytest.mark.parametrize('cls, depth, kwargs', [
    (GatedResNet, 18, TWO_STAGES), (GatedResNetV1c, 50, dict(DILATED, gated_maps=(2,))), (GatedResNetV1d, 50, DILATED),
    (GatedResNeXt, 50, dict(DILATED, groups=4, base_width=8))])
@pytest.mark.parametrize('keep_gates', [True, False], ids=['gated', 'plain'])
def test_backbones(cls, depth, kwargs, keep_gates, tmp_path):
    torch.manual_seed(0)
    model = spread_gates(cls(depth=depth, base_channels=16, stem_channels=16, **kwargs))
    model.eval()
    spread = torch.tensor([-4., 0., 4.])[:, None, None, None]  # different enough for gates to decide differently
    x = torch.randn(3, 3, 64, 64) * (spread + 4.2) + spread
    with torch.no_grad():
        expected = model(x)
        shares = {name: gate.decision.double().mean(0) for name, gate in gates(model)}
        if not keep_gates:  # without conditional gates a plain network is equal
            shares = {name: (share > 0).double() for name, share in shares.items()}
            for name, gate in gates(model):
                gate.forced = shares[name].float()
            expected = model(x)
        pruned = keep_used_filters(model, shares, threshold=1., keep_gates=keep_gates)
        slim = SlimResNeXt if cls is GatedResNeXt else SlimResNet
        assert type(pruned) is (cls if keep_gates else slim)
        again = MODELS.build(backbone_cfg(pruned))
        again.load_state_dict(pruned.state_dict())
        again.eval()
        for outputs in (network(x) for network in (pruned, again, accelerate(again))):
            for ours, theirs in zip(outputs, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    before, after = (sum(map(sum, inner_channels(net).values())) for net in (model, again))
    assert after < before

    if not keep_gates:
        return  # exported like any plain network
    session = onnxruntime.InferenceSession(export_onnx(again, tmp_path / 'net.onnx', (3, 64, 64)))
    for ours, theirs in zip(session.run(None, {'images': x.numpy()}), expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


@pytest.fixture(scope='module')
def segmentation(tmp_path_factory):
    """Config, weights, model and data."""
    folder = tmp_path_factory.mktemp('small')
    config = write_config(folder)
    model = MODELS.build(Config.fromfile(config).model)
    torch.manual_seed(0)
    spread_gates(model)
    torch.save({'state_dict': model.state_dict()}, folder / 'gated.pth')
    return config, folder / 'gated.pth', *create_segmentation(str(config), str(folder / 'gated.pth'))


def test_prune_static(segmentation):
    _, _, model, data = segmentation
    pruned = prune_static(model, data.loader, threshold=1.)
    assert pruned.after.accuracy == pytest.approx(pruned.before.accuracy)
    assert pruned.gates.always_off and pruned.gates.always_on and pruned.after.dense_macs < pruned.before.dense_macs
    batch = next(iter(data.loader))
    ours, theirs = (net.test_step(batch)[0].seg_logits.data for net in (pruned.model, model))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_specialize(segmentation):
    _, _, model, data = segmentation
    classes = [13, 0, 8]
    result = specialize(model, data.loader, classes)
    assert isinstance(result.model.backbone, SlimResNet) and not gates(result.model)
    assert result.model.decode_head.num_classes == 3 and isinstance(model.backbone, GatedResNet)
    right = total = 0
    for batch in data.loader:
        for sample in model.test_step(batch):
            truth, logits = sample.gt_sem_seg.data[0], sample.seg_logits.data[classes]
            chosen = torch.isin(truth, torch.tensor(classes))
            right += (torch.tensor(classes)[logits.argmax(0)] == truth)[chosen].double().mean()
            total += 1
    assert result.before.accuracy == pytest.approx(100 * float(right) / total)
    with pytest.raises(ValueError, match='there is no class 19; the model has the classes 0 to 18'):
        specialize(model, data.loader, [0, 19])


def test_class_without_images(segmentation):
    _, _, model, data = segmentation
    loader = [dict(batch) for batch in data.loader]
    for batch in loader:
        for sample in batch['data_samples']:
            sample.gt_sem_seg.data[sample.gt_sem_seg.data == 4] = 255
    with pytest.raises(ValueError, match='no sample of class 4'):
        specialize(model, loader, [0, 4])


def test_saved_config(segmentation):
    """Classes of the config, nested datasets, class weights and initial weights."""
    config, weights, model, data = segmentation
    cfg = Config.fromfile(config)
    result = specialize(model, data.loader, [2, 0])
    chosen = dict(cfg.train_dataloader.dataset, metainfo=dict(classes=('car', 'road', 'sky', 'wall')))
    cfg.train_dataloader.dataset = dict(type='RepeatDataset', times=2, dataset=chosen)
    cfg.val_dataloader = None
    cfg.model.pretrained = 'open-mmlab://resnet18_v1c'
    cfg.model.decode_head.loss_decode.class_weight = [0.1 * label for label in range(19)]
    saved = pruned_config(cfg, result.model, [2, 0])
    assert saved.train_dataloader.dataset.dataset.metainfo.classes == ['sky', 'car']
    assert saved.test_dataloader.dataset.metainfo.classes == ['building', 'road']
    assert saved.model.decode_head.loss_decode.class_weight == pytest.approx([0.2, 0.])
    assert saved.model.pretrained is None and cfg.model.pretrained
    assert len(model.gate_losses) and not len(result.model.gate_losses)  # there are no gates left


def test_command_line_options_are_saved(segmentation, tmp_path):
    config, _, _, _ = segmentation
    torch.save(MODELS.build(load_config(str(config), ['model.decode_head.channels=24']).model).state_dict(),
               tmp_path / 'weights.pth')
    options = ['--checkpoint', tmp_path / 'weights.pth', '--cfg-options', 'model.decode_head.channels=24']
    assert prune('--mmseg-config', config, *options, '--output', tmp_path / 'pruned') == 0
    model = MODELS.build(Config.fromfile(tmp_path / 'pruned' / 'config.py').model)
    model.load_state_dict(torch.load(tmp_path / 'pruned' / 'weights.pth', weights_only=True)['state_dict'])


def test_saved_calibrated_segmentor(segmentation, tmp_path, capsys):
    config, weights, model, _ = segmentation
    options = ['--mmseg-config', config, '--share', '0.75', '--tolerance', '0.1', '--images', '1']
    assert run_tool('calibrate', *options, '--checkpoint', weights, '--output', tmp_path / 'saved') == 0
    assert 'images: 1' in capsys.readouterr().out
    again = MODELS.build(Config.fromfile(tmp_path / 'saved' / 'config.py').model)
    again.load_state_dict(torch.load(tmp_path / 'saved' / 'weights.pth', weights_only=True)['state_dict'])
    changed = {name for name, value in again.state_dict().items() if not torch.equal(value, model.state_dict()[name])}
    assert changed == {f'{name}.fc2.bias' for name, _ in gates(model)}
    assert run_tool('calibrate', *options, '--checkpoint', weights, '--eval-split', 'val') == 2
    assert 'tools/test.py' in capsys.readouterr().err


def test_calibrated_backbones():
    model = spread_gates(GatedResNet(depth=18, base_channels=16, stem_channels=16, **TWO_STAGES))
    batches = [torch.randn(2, 3, 64, 64), torch.randn(1, 3, 32, 32)]
    result = calibrate(model, batches, 0.6, tolerance=0.01)
    assert result.share == pytest.approx(0.6, abs=0.01) and isinstance(result.model, GatedResNet)
    assert not result.model.training


@pytest.mark.parametrize('kwargs, message', [
    (dict(norm_cfg=dict(type='GN', num_groups=2)), 'only plain convolutions with batch norms'),
    (dict(plugins=[dict(cfg=dict(type='ContextBlock', ratio=1 / 16), position='after_conv2')], depth=50), 'plugins'),
])
def test_backbones_that_cannot_be_pruned(kwargs, message):
    model = GatedResNet(**{'depth': 18, **kwargs})
    with pytest.raises(ValueError, match=message):
        keep_used_filters(model, {'layer1.0.gate1': torch.zeros(64)})


def prune(*args) -> int:
    return run_tool('prune', *args)


def test_incomplete_weights(segmentation, tmp_path, capsys):
    config, weights, model, data = segmentation
    for tool, more in (('prune', []), ('analyze_gates', ['--output', tmp_path / 'report'])):
        assert run_tool(tool, '--mmseg-config', config, *more) == 2
        assert 'no weights for the network, which would be untrained. Give --checkpoint' in capsys.readouterr().err
    state_dict = model.state_dict()
    backbone = {key: value for key, value in state_dict.items() if key.startswith('backbone.')}
    dense = {key: value for key, value in state_dict.items() if '.gate' not in key}
    for kept, message in ((backbone, 'does not load into the model.*missing keys.*decode_head'),
                          (dense, 'no weights for the gates, which would be untrained')):
        torch.save({'state_dict': kept}, tmp_path / 'some.pth')
        assert prune('--mmseg-config', config, '--checkpoint', tmp_path / 'some.pth') == 2
        assert re.search(message, capsys.readouterr().err, re.DOTALL)
    assert prune('--mmseg-config', config, '--checkpoint', tmp_path / 'some.pth', '--untrained') == 0
    assert f'\n{config} (untrained gates)\n' in capsys.readouterr().out
    assert prune('--mmseg-config', config, '--cfg-options', f'load_from={weights}') == 0
    assert 'untrained' not in capsys.readouterr().out
    assert not (tmp_path / 'report').exists()


def test_missing_data(segmentation, capsys):
    config, weights, _, _ = segmentation
    moved = ['--cfg-options', 'test_dataloader.dataset.data_root=nowhere']
    assert prune('--mmseg-config', config, '--checkpoint', weights, *moved) == 2
    assert re.search('nowhere.* does not exist.*data_root=DIR', capsys.readouterr().err)


def test_mmseg_scripts_run_saved_models(segmentation, tmp_path, capsys):
    config, weights, _, _ = segmentation

    def run(script: str, *args) -> str:
        done = run_script(SCRIPTS / script, *args, cwd=tmp_path)
        assert done.returncode == 0, done.output[-4000:]
        return done.output

    common = ['--mmseg-config', config, '--checkpoint', weights]
    assert prune(*common, '--output', tmp_path / 'pruned') == 0
    printed = capsys.readouterr().out
    log = run('test.py', tmp_path / 'pruned' / 'config.py', tmp_path / 'pruned' / 'weights.pth',
              '--work-dir', tmp_path / 'test')
    average = float(re.search(r'average MACs +[\d.]+ M +([\d.]+) M', printed).group(1))
    assert float(re.search(r'GMACs: ([\d.]+)', log).group(1)) == pytest.approx(average / 1e3, abs=0.01)

    assert prune(*common, '--classes', 'road', 'car', '--output', tmp_path / 'special') == 0
    printed = capsys.readouterr().out
    log = run('train.py', tmp_path / 'special' / 'config.py', '--work-dir', tmp_path / 'train',
              '--cfg-options', 'train_cfg.max_iters=2')
    assert 'road' in log and 'sidewalk' not in log and 'unexpected key' not in log and 'size mismatch' not in log
    assert f'Load checkpoint from {tmp_path / "special" / "weights.pth"}' in log
    log = run('test.py', tmp_path / 'special' / 'config.py', tmp_path / 'special' / 'weights.pth',
              '--work-dir', tmp_path / 'test_special')
    accuracy = float(re.search(r'accuracy +[\d.]+ % +([\d.]+) %', printed).group(1))
    # Ours is the mean over images, mmseg's over pixels; classes in another order would give 100 % minus it.
    assert float(re.search(r'aAcc: ([\d.]+)', log).group(1)) == pytest.approx(accuracy, abs=2)

    assert prune(*common, '--classes', 'road', 'horse') == 2
    assert "there is no class 'horse'" in capsys.readouterr().err
    assert prune(*common, '--output', tmp_path / 'special') == 2
    assert 'special exists already' in capsys.readouterr().err
    assert prune(*common, '--classes', 'road', 'car', '--epochs', 2) == 2
    assert 'tools/train.py' in capsys.readouterr().err
