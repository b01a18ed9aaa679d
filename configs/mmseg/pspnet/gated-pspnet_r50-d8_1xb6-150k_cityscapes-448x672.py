# Gated PSPNet-R50 from scratch: batch shaping only, lambda fixed at 0.2 and applied to the sum over gates.
# Published: IoU 0.719 at 76.3 % of the MACs.
_base_ = ['./pspnet_r50-d8_1xb6-150k_cityscapes-448x672.py']
model = dict(
    count_macs=True,
    backbone=dict(type='GatedResNetV1c'),
    gate_losses=[dict(type='BatchShapingLoss', loss_weight=0.2, reduction='sum')])
# The weight decay of the gates is 1e-6.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'.gate': dict(decay_mult=0.01)}))
custom_hooks = [dict(type='GateStatisticsHook')]
val_evaluator = [dict(type='IoUMetric', iou_metrics=['mIoU']), dict(type='MACsMetric')]
test_evaluator = val_evaluator
