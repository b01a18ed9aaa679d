"""Conditional ONNX files have the outputs of the masked networks and compute only open filters"""
import json
import math
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import onnx
import onnxruntime
import pytest
import timm
import torch
import torch.nn as nn
from accelerated import is_decided
from hypothesis import assume, given
from hypothesis import strategies as st
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS
from nets import MECHANISMS, TINY, shuffle
from programs import programs
from saved_networks import family_program
from strategies import decisions, examples, forced_masks, in_channels, networks, seeds

from mmseg_plugin import GatedResNetV1c
from timm_gated import force_gates, gates
from timm_gated.inference import SlicedRunner
from timm_gated.inference.conditional_onnx import write_program
from timm_gated.inference.cost import output_shape
from timm_gated.inference.export import export_onnx, onnx_difference
from timm_gated.inference.program import (
    BlurOp,
    ConcatOp,
    ConvOp,
    GateOp,
    OutputOp,
    PoolOp,
    Program,
    ScaleOp,
    SkipOp,
    SubsampleOp,
)

BACKBONE: Dict[str, Any] = dict(
    depth=50, base_channels=8, stem_channels=8, strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4), contract_dilation=True,
    norm_cfg=dict(type='BN'))


def create(name: str, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **{**TINY.get(name, {}), **kwargs})).eval()


def backbone() -> nn.Module:
    torch.manual_seed(0)
    model = shuffle(GatedResNetV1c(**BACKBONE))
    model.eval()  # returns nothing
    return model


def segmentor(head: str, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    head_cfg = dict(
        type=head, in_channels=256, in_index=3, channels=12, num_classes=5, norm_cfg=dict(type='BN'),
        align_corners=False, loss_decode=dict(type='CrossEntropyLoss'))
    cfg = dict(
        type='GatedEncoderDecoder', backbone=dict(BACKBONE, type='GatedResNetV1c'), test_cfg=ConfigDict(mode='whole'))
    with DefaultScope.overwrite_default_scope('mmseg'):
        return shuffle(MODELS.build(dict(cfg, decode_head={**head_cfg, **kwargs}))).eval()


NETWORKS = {
    'basic': lambda: create('gated_resnet18'),
    'bottleneck': lambda: create('gated_resnet50'),
    'bottleneck with one gate': lambda: create('gated_resnet50', gated_maps=(2,)),
    'cifar': lambda: create('gated_resnet20', layers=(2, 1, 1)),
    'grey': lambda: create('gated_resnet20', in_chans=1),
    'dgnet': lambda: create('dgnet_resnet50'),
    'skips': lambda: create('convnet_aig_resnet20', layers=(2, 1, 1)),
    'skips of bottlenecks': lambda: create('convnet_aig_resnet50'),
    'groups': lambda: create('seresnext26d_32x4d', layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)),
    'channel attention': lambda: create('ecaresnet26t', layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)),
    'blur pooling': lambda: create('resnetblur18', layers=(1, 1, 1, 1), channels=(16, 16, 32, 32)),
    'dense': lambda: create('resnet18', channels=(8, 8, 16, 16)),
    'no classes': lambda: create('gated_resnet20', num_classes=0),
    'features': lambda: create('gated_resnet18', features_only=True),
    'one feature': lambda: create('gated_resnet20', features_only=True, out_indices=(2,)),
    'features of skips': lambda: create('convnet_aig_resnet18', features_only=True),
    'mmseg backbone': backbone,
    'pspnet': lambda: segmentor('PSPHead', pool_scales=(1, 2, 3, 6)),
    'aligned pspnet': lambda: segmentor('PSPHead', pool_scales=(1, 5), align_corners=True),
    'fcn': lambda: segmentor('FCNHead'),
}


def images(channels: int = 3, height: int = 33, width: int = 40, count: int = 3) -> torch.Tensor:
    x = torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(1))
    return x * torch.linspace(0.5, 2, count)[:, None, None, None]  # so that decisions differ


def all_graphs(graph: Any) -> List[Any]:
    """A graph and the graphs inside its nodes."""
    inner = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField('g')]
    return [graph, *(found for part in inner for found in all_graphs(part))]


def operators(path: Path) -> List[str]:
    """Check a file; returns the operators of all its nodes."""
    file = onnx.load(path)
    onnx.checker.check_model(file, full_check=True)
    assert [entry.domain for entry in file.opset_import] == ['']
    nodes = [node for graph in all_graphs(file.graph) for node in graph.node]
    assert all(node.domain == '' for node in nodes)
    return [node.op_type for node in nodes]


@pytest.mark.parametrize('name', NETWORKS)
@pytest.mark.parametrize('masks', [None, 'open', 'closed'], ids=str)
def test_outputs(name, masks, tmp_path):
    model = NETWORKS[name]()
    if masks and not gates(model):
        return
    x = images(in_channels(model))
    with force_gates(model, masks) if masks else nullcontext():
        path = export_onnx(model, tmp_path / 'new' / 'net.onnx', x.shape[1:], conditional=True)
        assert [file.name for file in path.parent.iterdir()] == ['net.onnx']
        with torch.no_grad():
            outputs = model(x)
        assert is_decided(model)
        for batch in (x, x[1:2]):
            assert onnx_difference(path, model, batch) < 1e-4
    is_conditional = bool(gates(model)) and masks != 'open'
    assert bool({'NonZero', 'If'} & set(operators(path))) == is_conditional
    session = onnxruntime.InferenceSession(path)
    maps = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    names = ['logits'] if isinstance(outputs, torch.Tensor) else [f'features{i}' for i in range(len(maps))]
    assert [(entry.name, entry.shape) for entry in session.get_inputs()] == [('images', ['batch', *x.shape[1:]])]
    assert [(entry.name, entry.shape) for entry in session.get_outputs()] == [
        (output, ['batch', *y.shape[1:]]) for output, y in zip(names, maps, strict=True)]


def test_only_open_filters_are_computed(tmp_path):
    model = create('gated_resnet50')
    kept = [max(1, gate.num_gates * index // 9) for index, (_, gate) in enumerate(gates(model))]
    masks = {name: torch.arange(gate.num_gates) < count
             for (name, gate), count in zip(gates(model), kept, strict=True)}
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / 'profile')
    with force_gates(model, masks):
        path = export_onnx(model, tmp_path / 'net.onnx', (3, 64, 64), conditional=True)
    session = onnxruntime.InferenceSession(path, options)
    session.run(None, {'images': images(3, 64, 64, 1).numpy()})
    events = json.loads(Path(session.end_profiling()).read_text())
    shapes = [next(iter(event['args']['output_type_shape'][0].values())) for event in events
              if event['name'].startswith('Conv') and event['args'].get('op_name') in ('Conv', 'FusedConv')]
    # One channel more, which is always open, and none for the shortcuts and the stem
    assert [shape[1] - 1 for shape in shapes if shape[1] % 16] == kept


@examples(20)
@given(model=networks(['gated_resnet18', 'gated_resnet20', 'gated_resnet50', 'convnet_aig_resnet20', 'slim_resnet50']),
       data=st.data(), height=st.integers(1, 40), width=st.integers(1, 40))
def test_random_networks(tmp_path_factory, model, data, height, width):
    x = images(in_channels(model), height, width)
    masks = data.draw(forced_masks(model))
    with force_gates(model, masks) if masks else nullcontext():
        with torch.no_grad():
            model(x)
        assume(is_decided(model))
        path = export_onnx(model, tmp_path_factory.mktemp('net') / 'net.onnx', x.shape[1:], conditional=True)
        assert onnx_difference(path, model, x) < 1e-4


# Programs


def run_program(program: Program, x: torch.Tensor) -> List[torch.Tensor]:
    names = [f'output{index}' for index in range(sum(isinstance(op, OutputOp) for op in program.ops))]
    model = write_program(program, x.shape[2], x.shape[3], flat=False, names=names, opset=23)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])
    return [torch.from_numpy(output) for output in session.run(None, {'images': x.numpy()})]


def check_program(program: Program, x: torch.Tensor) -> None:
    for actual, expected in zip(run_program(program, x), SlicedRunner(program)(x), strict=True):
        scale = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(actual / scale, expected / scale, atol=2e-5, rtol=0)


def map_shapes(program: Program, height: int, width: int) -> Optional[List[Tuple[int, ...]]]:
    """Shapes of all maps that a program writes; None if images of this size do not fit."""
    shapes: Dict[int, Tuple[int, ...]] = {0: (program.in_channels, height, width)}
    written = []
    for op in program.ops:
        if isinstance(op, (GateOp, SkipOp, OutputOp)):
            continue
        sources = op.sources if isinstance(op, ConcatOp) else (op.source,)
        shapes[op.target] = output_shape(op, *(shapes[source] for source in sources))
        written.append(shapes[op.target])
        residual = getattr(op, 'residual', None)
        if isinstance(op, BlurOp) and op.padding >= min(shapes[op.source][1:]):
            return None
        if min(written[-1]) < 1 or (residual is not None and shapes[residual] != written[-1]):
            return None
    return written


@pytest.mark.parametrize('name', MECHANISMS)
def test_closed_gates_of_variants(name, tmp_path):
    """tests/models/test_variants.py has their own decisions."""
    model, x = create(name, layers=(1, 1, 1, 1), channels=(32, 32, 32, 32)), images(3, 32, 64)
    with force_gates(model, 'closed'):
        path = export_onnx(model, tmp_path / 'net.onnx', x.shape[1:], conditional=True)
        assert onnx_difference(path, model, x) < 1e-4


def test_family_program():
    check_program(family_program(), images(3, 9, 12, 3))


def test_random_programs():
    seen: Counter = Counter()

    @examples(150)
    @given(arguments=programs(), height=st.integers(1, 12), width=st.integers(1, 12))
    def run(arguments, height, width):
        try:
            program = Program(*arguments)
        except ValueError:
            return
        x = images(program.in_channels, height, width, 2)
        shapes = map_shapes(program, height, width)
        if shapes is None:
            with pytest.raises(ValueError, match='are too small|a shortcut of'):
                run_program(program, x)
            return
        if any(math.prod(shape) > 2**20 for shape in shapes):
            return
        seen.update(['all', *(type(op) for op in program.ops)])
        check_program(program, x)

    run()
    assert seen['all'] >= 60 and all(
        seen[kind] >= 10 for kind in (BlurOp, ConcatOp, PoolOp, ScaleOp, SkipOp, SubsampleOp)), seen


def gated_program(data: st.DataObject, channels: int, inner: List[int], kernel: int, seed: int, **last: int) -> Program:
    """Convolutions with gated outputs, with gated inputs and outputs, and with gated inputs and a shortcut."""
    generator = torch.Generator().manual_seed(seed)

    def conv(source: int, out: int, into: int, side: int, **kwargs: Any) -> ConvOp:
        weight = torch.randn(out, into, side, side, generator=generator) / (into * side * side) ** 0.5
        return ConvOp(source, source + 1, weight, torch.randn(out, generator=generator), **kwargs)

    masks = [data.draw(decisions(width)) for width in inner]
    closing = [GateOp(0, number, torch.zeros(4, channels), torch.zeros(4), torch.zeros(len(mask), 4), mask - 0.5)
               for number, mask in enumerate(masks)]
    return Program(channels, [
        *closing,
        conv(0, inner[0], channels, 3, padding=1, relu=True, gate_out=0),
        conv(1, inner[1], inner[0], 3, padding=1, relu=True, gate_in=0, gate_out=1),
        conv(2, channels, inner[1], kernel, relu=True, gate_in=1, **last),
        OutputOp(3)], num_maps=4, num_gates=2)


@examples(40)
@given(data=st.data(), groups=st.integers(2, 5), sides=st.sampled_from([(True, True), (True, False), (False, True)]),
       stride=st.integers(1, 2), seed=seeds)
def test_gated_groups(data, groups, sides, stride, seed):
    generator = torch.Generator().manual_seed(seed)
    inner, outer = (groups * data.draw(st.integers(1, 4)) for _ in range(2))
    gate_in, gate_out = (number if is_gated else None for number, is_gated in enumerate(sides))
    masks = [data.draw(decisions(width)) for width in (inner, outer)]

    def weights(*shape: int) -> Tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(*shape, generator=generator) / 4, torch.randn(shape[0], generator=generator)

    check_program(Program(3, [
        *(GateOp(0, number, torch.zeros(4, 3), torch.zeros(4), torch.zeros(len(mask), 4), mask - 0.5)
          for number, mask in enumerate(masks)),
        ConvOp(0, 1, *weights(inner, 3, 1, 1), gate_out=gate_in),
        ConvOp(1, 2, *weights(outer, inner // groups, 3, 3), stride=stride, padding=1, relu=True, gate_in=gate_in,
               gate_out=gate_out, groups=groups),
        BlurOp(2, 1, 3, 1, 1), PoolOp(1, 2, True, 2, 1, 1, False),
        ConvOp(2, 1, *weights(5, outer, 1, 1), gate_in=gate_out), OutputOp(1)], num_maps=3, num_gates=2),
        images(3, 9, 7, 2))


@examples(100)
@given(data=st.data(), height=st.integers(1, 6), width=st.integers(1, 6), channels=st.integers(1, 20),
       inner=st.lists(st.integers(1, 99), min_size=2, max_size=2), kernel=st.sampled_from([1, 1, 2, 3, 3, 3]),
       stride=st.sampled_from([1, 1, 1, 2]), dilation=st.integers(1, 2), more=st.sampled_from([0, 0, 1, 3]), seed=seeds)
def test_gated_convolutions(data, height, width, channels, inner, kernel, stride, dilation, more, seed):
    padding = (dilation * (kernel - 1) + 1) // 2 + more
    program = gated_program(data, channels, inner, kernel, seed, stride=stride, dilation=dilation, padding=padding)
    check_program(program, images(channels, height, width, 2))


@pytest.mark.parametrize('opset', [13, 18, 24])
def test_opsets(opset, tmp_path):
    for name in ('skips', 'aligned pspnet'):
        model = NETWORKS[name]()
        path = export_onnx(model, tmp_path / 'net.onnx', (3, 33, 40), opset, conditional=True)
        assert onnx.load(path).opset_import[0].version == opset
        assert onnx_difference(path, model, images()) < 1e-4


# Errors


def test_images_of_another_size_are_refused(tmp_path):
    session = onnxruntime.InferenceSession(
        export_onnx(NETWORKS['cifar'](), tmp_path / 'net.onnx', (3, 16, 16), conditional=True))
    with pytest.raises(Exception, match='Got: 24 Expected: 16'):
        session.run(None, {'images': images(3, 24, 24).numpy()})


def with_attention() -> nn.Module:
    return timm.create_model('resnet18', block_args=dict(attn_layer='gc'))


@pytest.mark.parametrize('make, kwargs, message', [
    (lambda: create('gated_resnet20'), dict(opset=12), r'opset must be between 13 and \d+, .* got 12'),
    (lambda: create('gated_resnet20'), dict(opset=99), r'opset must be between 13 and \d+, .* got 99'),
    (lambda: create('gated_resnet20'), dict(input_size=(1, 8, 8)), 'must have the 3 channels of the network, got 1'),
    (lambda: create('gated_resnet20').half(), {}, 'has torch.float16. Export model.float()'),
    (lambda: create('gated_resnet20').double(), {}, 'has torch.float64. Export model.float()'),
    (lambda: create('fbs_resnet20'), {}, 'conditional=True: .* cannot be accelerated.* with conditional=False'),
    (lambda: create('skipnet_resnet38'), {}, 'conditional=True: .* cannot be accelerated.* with conditional=False'),
    (with_attention, {}, 'conditional=True: GlobalContext.* cannot be accelerated.* with conditional=False'),
    (lambda: create('gated_resnet20', global_pool='max'), {}, 'CifarResNet with .*pool_type=max.* exported'),
    (lambda: nn.Conv2d(3, 3, 1), {}, 'Conv2d cannot be exported. Supported: ResNets of timm'),
    (lambda: segmentor('FCNHead', act_cfg=dict(type='GELU')), {}, 'GatedEncoderDecoder cannot be exported.*FCNHead'),
])
def test_errors(make, kwargs, message, tmp_path):
    options = {'input_size': (3, 32, 32), **kwargs, 'conditional': True}
    with pytest.raises(ValueError, match=message):
        export_onnx(make(), tmp_path / 'new' / 'net.onnx', **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('ops, message', [
    ([ConvOp(0, 1, torch.zeros(2, 3, 9, 9), torch.zeros(2)), OutputOp(1)], 'images of 8 x 8 are too small: .* 0 x 0'),
    ([PoolOp(0, 1, False, 9, 1, 0, False), OutputOp(1)], 'images of 8 x 8 are too small'),
    ([ConvOp(0, 1, torch.zeros(3, 3, 1, 1), torch.zeros(3), stride=2, residual=0), OutputOp(1)],
     r'a shortcut of \(3, 8, 8\) cannot be added to a map of \(3, 4, 4\)'),
])
def test_images_that_do_not_fit(ops, message):
    with pytest.raises(ValueError, match=message):
        run_program(Program(3, ops, num_maps=2), images(3, 8, 8))


def test_onnx_is_optional(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'onnx', None)
    with pytest.raises(ImportError, match='conditional=True.* needs the package onnx: pip install onnx'):
        export_onnx(NETWORKS['cifar'](), tmp_path / 'net.onnx', (3, 8, 8), conditional=True)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = export_onnx(NETWORKS['cifar'](), tmp_path / 'net.onnx', (3, 8, 8), conditional=True)
    before = path.read_bytes()

    def fail(model, partial):
        Path(partial).write_bytes(b'half of it')
        raise RuntimeError('stopped')
    monkeypatch.setattr(onnx, 'save', fail)
    with pytest.raises(RuntimeError, match='stopped'):
        export_onnx(NETWORKS['basic'](), path, (3, 8, 8), conditional=True)
    assert path.read_bytes() == before and [file.name for file in tmp_path.iterdir()] == ['net.onnx']


def test_the_model_is_not_changed(tmp_path):
    model = NETWORKS['cifar']().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    path = export_onnx(model, tmp_path / 'net.onnx', (3, 8, 8), conditional=True)
    assert model.training and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert onnx_difference(path, model.eval(), images(3, 8, 8)) < 1e-4
