"""`timm-gated bench` with a whole segmentor, on small images"""
import json
from types import SimpleNamespace

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import pytest
import torch
from mmseg.models.decode_heads import PSPHead
from tool import load_tool, run_tool

from timm_gated import count_macs, gates
from timm_gated.inference import native


def test_pspnet(tmp_path, monkeypatch):
    monkeypatch.setattr(native, 'fma_peak', lambda isa: 100., raising=False)
    assert run_tool(
        'benchmark_inference', '--networks', 'pspnet_r50', '--img-size', '48', '--keep', '0.5', '--rounds', '1',
        '--threads', '1', '--batch-sizes', '1', '2', '--dense-runtimes', 'eager', 'openvino', '--isa', 'portable',
        '--output', tmp_path) == 0
    rows = json.loads((tmp_path / 'results.json').read_text())['rows']
    assert [(row['network'], row['runtime'], row['batch_size'], row['image_size']) for row in rows] == [
        (network, runtime, 1, [48, 96]) for network, runtimes in (
            ('pspnet_r50', ('eager', 'openvino')), ('gated_pspnet_r50', ('masked', 'torch')))
        for runtime in (*runtimes, 'native portable', 'native portable int8')]
    assert rows[4]['gmacs'] == rows[0]['gmacs'] and 0.3 < rows[5]['gmacs'] / rows[0]['gmacs'] < 0.9


@torch.no_grad()
def test_both_sides_are_whole_pspnets():
    network = load_tool('_bench_networks').find_network('pspnet_r50')
    assert network.image_size == (288, 576)
    dense, gated = network.dense(), network.gated()
    assert isinstance(dense.decode_head, PSPHead) and isinstance(gated.decode_head, PSPHead)
    assert not gates(dense) and gates(gated) and not dense.with_auxiliary_head
    image = torch.zeros(1, 3, 48, 96)
    assert dense(image).shape == gated(image).shape == (1, 19, 6, 12)
    assert count_macs(dense, image).dense == count_macs(gated, image).dense
    own = {name for name, _ in dense.named_parameters()}
    assert own < {name for name, _ in gated.named_parameters()}


@pytest.mark.parametrize('installed', [True, False])
def test_default_networks(installed, monkeypatch, capsys):
    tool = load_tool('benchmark_inference')
    monkeypatch.setattr(tool, 'has_mmseg', lambda: installed)
    args = SimpleNamespace(
        networks=None, quick=False, simulate=None, batch_sizes=[1, 32], img_size=None, checkpoint=None,
        dense_weights=None)
    expected = ['gated_resnet18', 'gated_resnet34', 'gated_resnet50', *['gated_pspnet_r50'] * installed]
    assert [network.name for network in tool.choose_networks(args)] == expected
    assert ('skipped pspnet_r50: mmsegmentation is not installed' in capsys.readouterr().out) is not installed
    args.quick = True
    assert [network.name for network in tool.choose_networks(args)] == expected[:3]


def test_pspnet_needs_mmseg(monkeypatch):
    networks = load_tool('_bench_networks')
    monkeypatch.setattr(networks, 'has_mmseg', lambda: False)
    with pytest.raises(ValueError, match='pspnet_r50 needs mmsegmentation'):
        networks.find_network('pspnet_r50')
