# Gated DeepLabV3+ with ResNet-18.
_base_ = ['./gated-deeplabv3plus_r50-d8_1xb6-150k-in1k-pre_cityscapes-448x672.py']
model = dict(
    backbone=dict(depth=18, init_cfg=dict(checkpoint='open-mmlab://resnet18_v1c')),
    decode_head=dict(in_channels=512, channels=128, c1_in_channels=64, c1_channels=12),
    auxiliary_head=dict(in_channels=256, channels=64))
