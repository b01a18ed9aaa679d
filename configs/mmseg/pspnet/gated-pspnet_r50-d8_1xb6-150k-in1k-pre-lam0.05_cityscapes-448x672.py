# Gated PSPNet-R50 from ImageNet weights, lambda 0.05. Published: IoU 0.747 at 95 % of the MACs.
_base_ = ['./gated-pspnet_r50-d8_1xb6-150k-in1k-pre_cityscapes-448x672.py']
model = dict(gate_losses=[dict(type='BatchShapingLoss', loss_weight=0.05, reduction='sum')])
