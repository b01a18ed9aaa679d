# Gated DeepLabV3+ with ResNeXt-50 (32x4d), which mmseg has no config for.
_base_ = ['./gated-deeplabv3plus_r50-d8_1xb6-150k-in1k-pre_cityscapes-448x672.py']
model = dict(
    backbone=dict(
        type='GatedResNeXt',
        groups=32,
        base_width=4,
        init_cfg=dict(checkpoint='open-mmlab://resnext50_32x4d')))
