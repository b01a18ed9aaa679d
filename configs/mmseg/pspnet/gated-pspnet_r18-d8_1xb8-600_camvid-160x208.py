# Gated PSPNet-R18 from scratch on CamVid, for two CPU cores: batch shaping only, lambda fixed at 0.2 and applied to the
# sum over gates, as in the paper's Cityscapes experiment.
_base_ = ['./pspnet_r18-d8_1xb8-600_camvid-160x208.py']
model = dict(
    backbone=dict(type='GatedResNetV1c'),
    gate_losses=[dict(type='BatchShapingLoss', loss_weight=0.2, reduction='sum')])
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'.gate': dict(decay_mult=0.01)}))
custom_hooks = [dict(type='GateStatisticsHook')]
