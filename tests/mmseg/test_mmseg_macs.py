"""MACs of segmentors: against fvcore for heads that fold regions into the batch, and as `MACsMetric` reports them"""
import copy
from typing import Any, Dict

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import torch
import torch.nn as nn
from fvcore.nn import FlopCountAnalysis
from mmengine.config import ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.registry import DefaultScope
from mmseg.registry import METRICS, MODELS
from mmseg_small import TINY, tiny_samples
from nets import images, shuffle

from mmseg_plugin.pruning import calibrate
from timm_gated import MacCounter, accelerate, count_macs, force_gates

HEAD: Dict[str, Any] = dict(
    in_channels=64, in_index=3, channels=16, num_classes=5, norm_cfg=dict(type='BN'),
    loss_decode=dict(type='CrossEntropyLoss'))
SEGFORMER = dict(
    backbone=dict(
        type='MixVisionTransformer', embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 2, 4, 8],
        sr_ratios=[8, 4, 2, 1]),
    decode_head=dict(type='SegformerHead', **dict(HEAD, in_channels=[8, 16, 32, 64], in_index=[0, 1, 2, 3])))


def build(cfg: Dict[str, Any]) -> nn.Module:
    cfg = dict(dict(test_cfg=ConfigDict(mode='whole')), **cfg)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(cfg)
    model.eval()
    return model


def with_resnet(*heads: Dict[str, Any]) -> Dict[str, Any]:
    backbone = dict(
        type='ResNetV1c', depth=18, base_channels=8, stem_channels=8, dilations=(1, 1, 2, 4), strides=(1, 2, 1, 1))
    heads_cfg = [dict(HEAD, **head) for head in heads]
    if len(heads) == 1:
        return dict(type='EncoderDecoder', backbone=backbone, decode_head=heads_cfg[0])
    return dict(type='CascadeEncoderDecoder', num_stages=2, backbone=backbone, decode_head=heads_cfg)


def data(count: int = 2) -> Dict[str, Any]:
    batch = pseudo_collate(tiny_samples(count))
    for sample in batch['data_samples']:
        sample.set_metainfo(dict(ori_shape=(16, 16), pad_shape=(16, 16), img_path=''))
    return batch


@torch.no_grad()
def predict(model: nn.Module, count: int = 2) -> list:
    return model.test_step(data(count))


def tiny(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    preprocessor = dict(type='SegDataPreProcessor', size=(16, 16))
    return shuffle(build({**TINY, 'data_preprocessor': preprocessor, 'count_macs': True, **kwargs}))


@pytest.mark.parametrize('cfg, products', [
    (with_resnet(dict(type='PSPHead')), set()),
    (with_resnet(dict(type='ISAHead', isa_channels=8, down_factor=(4, 4))), {'matmul'}),
    (with_resnet(dict(type='DMHead')), set()),  # convolutions with kernels computed from the image
    (with_resnet(dict(type='FCNHead', concat_input=False), dict(type='OCRHead', ocr_channels=8)), {'matmul'}),
    (dict(type='EncoderDecoder', **SEGFORMER), {'multi_head_attention_forward'}),
], ids=['pspnet', 'isanet', 'dmnet', 'ocrnet', 'segformer'])
def test_segmentors_agree_with_fvcore(cfg, products):
    model, x = build(cfg), images(2, 3, 64, 64)
    macs = count_macs(model, x)
    analysis = FlopCountAnalysis(model, x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    reference = analysis.by_operator()
    assert 2 * macs.dense == reference['conv'] + reference['linear']
    assert macs.per_sample.tolist() == [macs.dense] * 2 and set(macs.uncounted) == products


def test_calibrated_segmentors():
    """Heads count as MACs that gates cannot save; mmseg's batches go through the data preprocessor."""
    model = tiny()
    result = calibrate(model, [data(6), data(2)], 0.6, tolerance=0.05)
    macs = [sample.macs for batch in (data(6), data(2)) for sample in result.model.test_step(batch)]
    dense = count_macs(model, model.data_preprocessor(data(1))['inputs']).dense
    assert sum(macs) / 8 / dense == pytest.approx(result.share) == pytest.approx(0.6, abs=0.05)
    assert result.num_samples == 8 and type(result.model) is type(model)


def test_every_result_has_its_macs():
    model = tiny()
    results = predict(model, 3)
    counted = count_macs(model, model.data_preprocessor(data(3))['inputs'])  # `forward`: backbone and decode head
    assert [result.macs for result in results] == counted.per_sample.tolist()
    assert {result.dense_macs for result in results} == {counted.dense}
    assert any(name.startswith('decode_head') for name in counted.by_module)


@pytest.mark.parametrize('accelerated', [False, True])
def test_counting_is_opt_in(accelerated, monkeypatch):
    """Predictions do not depend on counting, and `MacCounter` is not entered unless `count_macs` is set."""
    models = tiny(), tiny(count_macs=False), build(dict(TINY))
    counting, silent, default = map(accelerate, models) if accelerated else models
    expected = predict(counting, 3)
    monkeypatch.setattr(MacCounter, '__enter__', lambda self: pytest.fail('MACs were counted'))
    results = predict(silent, 3)
    assert not default.count_macs and not any('macs' in result for result in results)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result.seg_logits.data, other.seg_logits.data)
        assert torch.equal(result.pred_sem_seg.data, other.pred_sem_seg.data)


def test_metric():
    metric = METRICS.build(dict(type='MACsMetric'))
    metric.process(None, [dict(macs=10**9, dense_macs=4 * 10**9), dict(macs=3 * 10**9, dense_macs=4 * 10**9)])
    assert metric.evaluate(size=2) == {'GMACs': 2., 'dense_GMACs': 4., 'MACs_share': 50.}
    silent = predict(tiny(count_macs=False))
    with pytest.raises(ValueError, match=r'without `macs`. Set model\.count_macs=True in the config.*GatedEncoderDec'):
        metric.process(None, [result.to_dict() for result in silent])


def test_regions_of_a_head_are_not_images():
    """`predict` calls the backbone and the layers of the head, not `forward`."""
    head = dict(HEAD, type='ISAHead', in_channels=8, in_index=2, isa_channels=4, down_factor=(4, 4))
    model = tiny(decode_head=head)
    expected = count_macs(model, model.data_preprocessor(data())['inputs'])
    assert [result.macs for result in predict(model)] == expected.per_sample.tolist()
    with torch.no_grad(), MacCounter(model) as counter:
        model.test_step(data())
    assert torch.equal(counter.macs().per_sample, expected.per_sample)


def test_macs_of_sliding_windows_add_up():
    model = tiny(test_cfg=ConfigDict(mode='slide', crop_size=(16, 8), stride=(16, 8)))
    expected = sum(
        count_macs(model, half).per_sample
        for half in model.data_preprocessor(data())['inputs'].split(8, dim=3))
    assert [result.macs for result in predict(model)] == expected.tolist() and expected[0] != expected[1]


def test_compiled_segmentor_counts():
    torch._dynamo.reset()
    model = tiny()
    expected = [(result.macs, result.dense_macs) for result in predict(model)]
    model.forward = torch.compile(model.forward, backend='eager')  # as mmengine does
    for _ in range(2):
        assert [(result.macs, result.dense_macs) for result in predict(model)] == expected


@pytest.mark.parametrize('backend', ['native', 'torch'])
def test_accelerated_segmentor(backend):
    model = tiny()
    fast = accelerate(model, backend)
    metrics = []
    for network in (model, fast):
        metric = METRICS.build(dict(type='MACsMetric'))
        metric.process({}, [result.to_dict() for result in predict(network, 3)])
        metrics.append((metric.results, metric.compute_metrics(metric.results)))
    assert metrics[0] == metrics[1]
    assert len({macs for macs, _ in metrics[1][0]}) > 1 and metrics[1][1]['MACs_share'] < 101


def test_accelerated_segmentor_by_hand():
    model = tiny()
    with force_gates(model, 'closed'):
        closed = accelerate(model)
    with force_gates(model, 'open'):
        opened = accelerate(model)
    results = [predict(network)[0] for network in (closed, opened)]
    stem, head = 9 * 3 * 8 * 256, 8 * 5 * 16
    blocks = 2 * 9 * 64 * 256, 9 * 64 * 64 * 2, 9 * 64 * 16 * 2
    shortcuts, gates = 0, 8 * (256 + 256 + 64) + 3 * 2 * 8 * 16
    assert results[0].dense_macs == stem + head + sum(blocks) + shortcuts
    assert [result.macs for result in results] == [
        stem + head + shortcuts + gates, stem + head + shortcuts + gates + sum(blocks)]


def test_copies_of_an_accelerated_segmentor_count():
    fast = accelerate(tiny())
    assert [r.macs for r in predict(copy.deepcopy(fast))] == [r.macs for r in predict(fast)]
