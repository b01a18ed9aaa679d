# Dense PSPNet-R18 from scratch on CamVid, for two CPU cores.
_base_ = [
    'mmseg::_base_/models/pspnet_r50-d8.py', 'mmseg::_base_/default_runtime.py', '../_base_/camvid_240x320.py'
]
norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    type='GatedEncoderDecoder',  # for count_macs; the backbone has no gates
    count_macs=True,
    data_preprocessor=dict(size=(160, 208)),
    pretrained=None,
    backbone=dict(depth=18, norm_cfg=norm_cfg),
    decode_head=dict(in_channels=512, channels=128, num_classes=11, norm_cfg=norm_cfg),
    auxiliary_head=dict(in_channels=256, channels=64, num_classes=11, norm_cfg=norm_cfg))
max_iters = 600
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=1e-4), clip_grad=None)
param_scheduler = [dict(type='PolyLR', eta_min=0., power=0.9, begin=0, end=max_iters, by_epoch=False)]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=300)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=20, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='CheckpointHook', by_epoch=False, interval=300, max_keep_ckpts=2,
        backend_args=dict(backend='timm_gated_local')),  # atomic writes
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
randomness = dict(seed=0)
