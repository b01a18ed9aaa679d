# Gated PSPNet on CamVid with the CIFAR ResNet-20 as backbone, from the packaged CIFAR-10 weights.
_base_ = ['./gated-pspnet_r18-d8_1xb8-600_camvid-160x208.py']
model = dict(
    backbone=dict(
        _delete_=True,
        type='TimmGatedBackbone',
        model_name='gated_resnet20',
        init_cfg=dict(type='Pretrained', checkpoint='timm-gated://gated_resnet20.bas_c10')),
    decode_head=dict(in_channels=64, channels=64),
    auxiliary_head=dict(in_channels=32, channels=32))
