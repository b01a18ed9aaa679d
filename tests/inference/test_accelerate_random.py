"""Accelerated networks have the outputs of the masked ones, for random architectures, masks, image and batch sizes"""
from contextlib import nullcontext

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import torch
import torch.nn as nn
from accelerated import BACKENDS, check, is_decided
from hypothesis import assume, given
from hypothesis import strategies as st
from nets import shuffle
from strategies import examples, forced_masks, images, in_channels, networks, seeds

from mmseg_plugin import GatedResNet, GatedResNetV1c, GatedResNetV1d
from timm_gated import force_gates

METHODS = ('gated', 'convnet_aig')
NAMES = [f'{method}_resnet{depth}' for method in METHODS for depth in (18, 20, 50)] + [
    'slim_resnet18', 'slim_resnet50', 'cifar_resnet20']


def check_everywhere(model: nn.Module, data: st.DataObject) -> None:
    x = data.draw(images(in_channels(model)))
    masks = data.draw(forced_masks(model))
    with force_gates(model, masks) if masks else nullcontext():
        with torch.no_grad():
            model(x)
        assume(is_decided(model))
        for backend, isa in BACKENDS:
            check(model, x, backend, isa)


@examples(80)
@given(model=networks(NAMES), data=st.data())
def test_networks(model, data):
    check_everywhere(model, data)


@examples(40)
@given(data=st.data(), cls=st.sampled_from([GatedResNet, GatedResNetV1c, GatedResNetV1d]), seed=seeds,
       depth=st.sampled_from([18, 50]), widths=st.tuples(st.integers(1, 9), st.integers(1, 6)),
       stages=st.integers(1, 4), dilated=st.integers(0, 2), contracted=st.booleans(),
       style=st.sampled_from(['pytorch', 'caffe']))
def test_backbones_of_mmseg(data, cls, seed, depth, widths, stages, dilated, contracted, style):
    torch.manual_seed(seed)
    model = shuffle(cls(
        depth=depth, base_channels=widths[0], stem_channels=2 * widths[1], num_stages=stages, style=style,
        out_indices=sorted({0, stages - 1}), contract_dilation=contracted,
        strides=((1, 2, 2, 2), (1, 2, 2, 1), (1, 2, 1, 1))[dilated][:stages],
        dilations=((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 2, 4))[dilated][:stages]), seed)
    model.eval()
    check_everywhere(model, data)
