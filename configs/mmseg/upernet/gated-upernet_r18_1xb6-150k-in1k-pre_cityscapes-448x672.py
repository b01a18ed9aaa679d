# Gated UPerNet with ResNet-18.
_base_ = ['./gated-upernet_r50_1xb6-150k-in1k-pre_cityscapes-448x672.py']
model = dict(
    backbone=dict(depth=18, init_cfg=dict(checkpoint='open-mmlab://resnet18_v1c')),
    decode_head=dict(in_channels=[64, 128, 256, 512]),
    auxiliary_head=dict(in_channels=256))
