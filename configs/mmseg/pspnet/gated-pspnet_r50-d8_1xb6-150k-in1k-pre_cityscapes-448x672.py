# Gated PSPNet-R50 from ImageNet weights, lambda 0.2. Published: IoU 0.744 at 76.5 % of the MACs.
_base_ = ['./gated-pspnet_r50-d8_1xb6-150k_cityscapes-448x672.py']
model = dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='open-mmlab://resnet50_v1c')))
