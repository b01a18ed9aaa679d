# Dense PSPNet-R50 from ImageNet weights. Published: IoU 0.739.
_base_ = ['./pspnet_r50-d8_1xb6-150k_cityscapes-448x672.py']
model = dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='open-mmlab://resnet50_v1c')))
