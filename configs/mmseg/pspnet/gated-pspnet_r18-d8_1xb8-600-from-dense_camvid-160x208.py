# Gate the trained PSPNet-R18 on CamVid, for two CPU cores: weak batch shaping, a budget of 75 % of the MACs of the
# whole network, and distillation from the dense network that is being gated.
#
# Dense network: pspnet_r18-d8_1xb8-600_camvid-160x208.py. Gates start open.
# Another budget on the command line: --cfg-options model.gate_losses.1.budget=0.6
_base_ = ['./pspnet_r18-d8_1xb8-600_camvid-160x208.py']
dense = 'work_dirs/pspnet_r18-d8_1xb8-600_camvid-160x208/iter_600.pth'
max_iters = 600
model = dict(
    init_cfg=dict(type='Pretrained', checkpoint=dense),
    backbone=dict(type='GatedResNetV1c', gate_cfg=dict(bias=2.)),
    gate_losses=[
        dict(type='BatchShapingLoss', loss_weight=0.003, reduction='sum'),
        dict(type='MACBudgetLoss', budget=0.75, loss_weight=20.),
        dict(
            type='DistillationLoss',
            teacher_config='configs/mmseg/pspnet/pspnet_r18-d8_1xb8-600_camvid-160x208.py',
            teacher_ckpt=dense),
    ])
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'.gate': dict(decay_mult=0.01)}))
custom_hooks = [
    dict(
        type='GateLossScheduleHook', loss_name='loss_batch_shaping', schedule='linear_anneal', begin=0,
        end=max_iters // 2),
    dict(type='GateNoiseScheduleHook', begin=0, end=max_iters * 5 // 8),
    dict(type='GateStatisticsHook'),
]
