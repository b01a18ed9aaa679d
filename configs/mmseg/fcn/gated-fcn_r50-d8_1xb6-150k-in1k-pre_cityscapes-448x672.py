# Gated FCN with ResNet-50.
_base_ = ['mmseg::_base_/models/fcn_r50-d8.py', '../_base_/gated_cityscapes_448x672_150k.py']
model = _base_.gated_model
