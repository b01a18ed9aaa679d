# The paper's Cityscapes schedule for gated segmentors: weight decay 1e-6 on gates, MACs and statistics of the gates in
# the log. `gated_model` is what a gated model with a ResNet-50 from ImageNet weights differs in from mmseg's own: batch
# shaping only, lambda 0.2, applied to the sum over gates. BN instead of SyncBN, for one GPU.
_base_ = ['mmseg::_base_/default_runtime.py', './cityscapes_448x672_150k.py']
gated_model = dict(
    type='GatedEncoderDecoder',
    count_macs=True,
    data_preprocessor=dict(size=(448, 672)),
    pretrained=None,
    backbone=dict(
        type='GatedResNetV1c',
        norm_cfg=dict(type='BN', requires_grad=True),
        init_cfg=dict(type='Pretrained', checkpoint='open-mmlab://resnet50_v1c')),
    decode_head=dict(norm_cfg=dict(type='BN', requires_grad=True)),
    auxiliary_head=dict(norm_cfg=dict(type='BN', requires_grad=True)),
    gate_losses=[dict(type='BatchShapingLoss', loss_weight=0.2, reduction='sum')])
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'.gate': dict(decay_mult=0.01)}))
custom_hooks = [dict(type='GateStatisticsHook')]
val_evaluator = [dict(type='IoUMetric', iou_metrics=['mIoU']), dict(type='MACsMetric')]
test_evaluator = val_evaluator
