"""Exported gated, pruned and specialized networks have the outputs of torch"""
import copy
import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from nets import SMALL, TINY, is_imagenet, shuffle
from small_analysis import make_batches, make_net
from timm.utils.onnx import onnx_export
from tool import run_tool

from timm_gated import force_gates
from timm_gated.hub.hub import save_pretrained
from timm_gated.inference.export import export_onnx, export_program, onnx_difference
from timm_gated.pruning.prune import prune_static, specialize


@pytest.fixture(scope='module')
def networks():
    net, batches = make_net(), make_batches()
    with torch.no_grad():
        for index in (1, 2, 3):
            getattr(net, f'layer{index}')[0].gate1.fc2.bias.copy_(torch.linspace(-9, 9, 8))
    return {
        'gated': net,
        'pruned': prune_static(net, batches, threshold=0.9).model,
        'specialized': specialize(net, batches, [1, 4], threshold=0.9).model,
        'bottleneck': shuffle(timm.create_model('gated_resnet50', num_classes=3, **TINY['gated_resnet50'])).eval(),
    }


def images(count: int, size: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize('name, size', [('gated', 8), ('pruned', 8), ('specialized', 8), ('bottleneck', 64)])
def test_onnx(networks, name, size, tmp_path):
    net = networks[name]
    path = export_onnx(net, tmp_path / 'new' / 'net.onnx', (3, size, size))
    assert [p.name for p in path.parent.iterdir()] == ['net.onnx']  # weights are in the same file
    graph = onnx.load(path)
    onnx.checker.check_model(graph, full_check=True)
    assert graph.opset_import[0].version == 23
    for count in (1, 2, 5):
        assert onnx_difference(path, net, images(count, size)) < 1e-4
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.fc.bias.add_(0.01)
    assert onnx_difference(path, other, images(3, size)) > 1e-3
    session = onnxruntime.InferenceSession(path)
    assert (session.get_inputs()[0].name, session.get_outputs()[0].name) == ('images', 'logits')
    assert isinstance(session.get_inputs()[0].shape[0], str)  # dynamic


@pytest.mark.parametrize('name', [name for name in SMALL if not is_imagenet(name)])
def test_onnx_of_any_method(name, tmp_path):
    torch.manual_seed(0)
    net = shuffle(timm.create_model(name, **TINY[name])).eval()
    path = export_onnx(net, tmp_path / 'net.onnx', (3, 16, 16))
    for count in (1, 3):
        assert onnx_difference(path, net, images(count, 16)) < 1e-4


@pytest.mark.parametrize('name', ['gated', 'pruned'])
def test_timm_exporter(networks, name, tmp_path):
    """The function that timm's onnx_export.py calls."""
    path = str(tmp_path / 'net.onnx')
    onnx_export(networks[name], path, input_size=(3, 8, 8), batch_size=2, check_forward=True)
    session = onnxruntime.InferenceSession(path)
    x = images(5)
    with torch.no_grad():
        expected = networks[name](x).numpy()
    np.testing.assert_allclose(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0], expected, atol=1e-4)


def test_timm_exporter_on_a_saved_model(networks, tmp_path):
    """The input size comes from the config, where it is a list after the JSON round trip."""
    save_pretrained(networks['pruned'], tmp_path / 'pruned')
    onnx_export(timm.create_model(f'local-dir:{tmp_path / "pruned"}', pretrained=True), str(tmp_path / 'net.onnx'))
    assert onnxruntime.InferenceSession(tmp_path / 'net.onnx').get_inputs()[0].shape[1:] == [3, 32, 32]


@pytest.mark.parametrize('name', ['gated', 'specialized'])
def test_program(networks, name, tmp_path):
    path = export_program(networks[name], tmp_path / 'net.pt2', (3, 8, 8))
    program = torch.export.load(path).module()
    with torch.no_grad():
        for count in (1, 3):
            torch.testing.assert_close(program(images(count)), networks[name](images(count)), atol=1e-5, rtol=1e-5)


def test_features(tmp_path):
    net = shuffle(timm.create_model('gated_resnet20', features_only=True, layers=(1, 1, 1))).eval()
    path = export_onnx(net, tmp_path / 'net.onnx', (3, 16, 16))
    assert [o.name for o in onnxruntime.InferenceSession(path).get_outputs()] == [f'features{i}' for i in range(4)]
    assert onnx_difference(path, net, images(3, 16)) < 1e-4


def test_forced_gates_stay_forced(networks, tmp_path):
    net = networks['gated']
    with force_gates(net, 'open'):
        path = export_onnx(net, tmp_path / 'net.onnx', (3, 8, 8))
        assert onnx_difference(path, net, images(3)) < 1e-4
    assert onnx_difference(path, net, images(3)) > 1e-3


def test_channels_are_those_of_the_network(tmp_path):
    net = timm.create_model('gated_resnet20', in_chans=1, layers=(1, 1, 1)).eval()
    session = onnxruntime.InferenceSession(export_onnx(net, tmp_path / 'net.onnx'))
    assert session.get_inputs()[0].shape[1:] == [1, 32, 32]


def test_half_precision(networks, tmp_path):
    net = copy.deepcopy(networks['gated']).half()
    session = onnxruntime.InferenceSession(export_onnx(net, tmp_path / 'half.onnx', (3, 8, 8)))
    x = images(3)
    actual, = session.run(None, {'images': x.half().numpy()})
    torch.testing.assert_close(torch.from_numpy(actual).float(), networks['gated'](x), atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match='Export model.float'):
        export_onnx(net.bfloat16(), tmp_path / 'bfloat16.onnx', (3, 8, 8))
    assert [path.name for path in tmp_path.iterdir()] == ['half.onnx']


def test_a_failure_leaves_no_file(networks, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r'input_size must be channels, height and width, got \(8, 8\)'):
        export_onnx(networks['gated'], tmp_path / 'net.onnx', (8, 8))

    def fail(model, args, path, **kwargs):
        Path(path).write_bytes(b'half of it')
        raise RuntimeError('stopped')
    monkeypatch.setattr(torch.onnx, 'export', fail)
    with pytest.raises(RuntimeError, match='stopped'):
        export_onnx(networks['gated'], tmp_path / 'net.onnx', (3, 8, 8))
    assert not list(tmp_path.iterdir())


def main(*args) -> int:
    return run_tool('export_onnx', *args)


def test_tool(networks, tmp_path, capsys):
    for name in ('gated', 'specialized'):
        save_pretrained(networks[name], tmp_path / name)
    common = ['--pretrained', '--input-size', 3, 8, 8]
    assert main('--model', f'local-dir:{tmp_path / "gated"}', '--output', tmp_path / 'gated.onnx', *common) == 0
    assert 'batches of any size, outputs differ by' in capsys.readouterr().out
    command = ['--model', f'local-dir:{tmp_path / "specialized"}', '--output', tmp_path / 'small.onnx', *common]
    assert main(*command, '--compare', tmp_path / 'gated.onnx', '--rounds', 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].endswith('1.00 x') and 'gated.onnx: ' in lines[2]
    assert main('--model', f'local-dir:{tmp_path / "gated"}', '--output', tmp_path / 'gated.pt2', *common) == 0
    assert 'torch.export' in capsys.readouterr().out

    assert main(*command) == 2 and 'small.onnx exists' in capsys.readouterr().err
    assert main('--output', tmp_path / 'x.onnx') == 2 and 'Give --model' in capsys.readouterr().err
    assert main('--model', 'gated_resnet20', '--output', tmp_path / 'x.tflite') == 2
    assert 'must end in .onnx' in capsys.readouterr().err
    assert main(*command, '--overwrite', '--compare', tmp_path / 'none.onnx') == 2
    assert 'no file' in capsys.readouterr().err


def test_tool_for_conditional_files(networks, tmp_path, capsys):
    for name in ('gated', 'specialized'):
        save_pretrained(networks[name], tmp_path / name)
    common = ['--pretrained', '--input-size', 3, 8, 8, '--conditional', '--rounds', 2]
    path = tmp_path / 'gated.onnx'
    command = ['--model', f'local-dir:{tmp_path / "gated"}', *common]
    assert main(*command, '--output', path) == 0
    summary, macs, *rows = capsys.readouterr().out.splitlines()
    assert 'batches of any size, outputs differ by' in summary
    assert re.fullmatch(r'.*gated\.onnx: conditional, \d+% of the MACs', macs)
    assert [row.split(': ')[0] for row in rows] == [str(path), 'masked', 'dense'] and rows[0].endswith('1.00 x')
    assert 'NonZero' in {node.op_type for node in onnx.load(path).graph.node[0].attribute[0].g.node}
    assert sorted(file.name for file in tmp_path.iterdir()) == ['gated', 'gated.onnx', 'specialized']

    assert main(*command, '--output', tmp_path / 'other.onnx', '--compare', path, '--batch-size', 2, '--json') == 0
    result, shown = capsys.readouterr()
    assert f'\n{path}: ' in shown and 'batch 2' in shown
    result = json.loads(result)
    assert result['difference'] < 1e-4 and 0 < result['macs_share'] < 1.1
    assert list(result['milliseconds']) == [str(tmp_path / 'other.onnx'), 'masked', 'dense', str(path)]
    assert main(*command, '--output', tmp_path / 'gated.pt2') == 2
    assert '--conditional writes ONNX files: --output must end in .onnx' in capsys.readouterr().err
    assert main('--model', f'local-dir:{tmp_path / "specialized"}', *common, '--output', tmp_path / 'net.onnx') == 2
    assert 'has no gates: leave out --conditional' in capsys.readouterr().err


def test_tool_deletes_wrong_files(networks, tmp_path, capsys, monkeypatch):
    save_pretrained(networks['gated'], tmp_path / 'gated')
    monkeypatch.setattr('timm_gated.inference.onnx_difference', lambda *args: 0.5)
    command = ['--model', f'local-dir:{tmp_path / "gated"}', '--output', tmp_path / 'gated.onnx', '--pretrained']
    assert main(*command, '--input-size', 3, 8, 8) == 1
    assert 'outputs differ by 0.5' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['gated']
