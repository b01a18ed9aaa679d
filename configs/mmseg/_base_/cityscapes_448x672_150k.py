# The paper's Cityscapes schedule: crop 448 x 672, mirror, resize by 0.5 to 2, batch 6, 150k iterations, lr 2e-2 poly
# 0.9, momentum 0.9, weight decay 1e-4. One GPU, hence BN instead of SyncBN.
_base_ = ['mmseg::_base_/datasets/cityscapes.py']
custom_imports = dict(imports=['mmseg_plugin'], allow_failed_imports=False)
crop_size = (448, 672)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(2048, 1024), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
train_dataloader = dict(batch_size=6, num_workers=4, dataset=dict(pipeline=train_pipeline))
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='SGD', lr=0.02, momentum=0.9, weight_decay=1e-4), clip_grad=None)
param_scheduler = [dict(type='PolyLR', eta_min=0., power=0.9, begin=0, end=150000, by_epoch=False)]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=150000, val_interval=5000)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='CheckpointHook', by_epoch=False, interval=5000, save_best='mIoU',
        backend_args=dict(backend='timm_gated_local')),  # atomic writes
    sampler_seed=dict(type='DistSamplerSeedHook'),
    visualization=dict(type='SegVisualizationHook'))
