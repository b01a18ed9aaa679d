# Dense PSPNet-R50 from scratch, the paper's baseline. Published: IoU 0.706.
_base_ = [
    'mmseg::_base_/models/pspnet_r50-d8.py', 'mmseg::_base_/default_runtime.py',
    '../_base_/cityscapes_448x672_150k.py'
]
norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    type='GatedEncoderDecoder',  # without gates: it lets mmengine load its checkpoints on torch >= 2.6
    data_preprocessor=dict(size=(448, 672)),
    pretrained=None,
    backbone=dict(norm_cfg=norm_cfg),
    decode_head=dict(norm_cfg=norm_cfg),
    auxiliary_head=dict(norm_cfg=norm_cfg))
