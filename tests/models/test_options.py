"""The table of options agrees with the signatures of the classes that receive them."""
import inspect
from typing import Set

import pytest
import timm
from nets import GATED, family
from timm.models import build_model_with_cfg
from timm.models.resnet import BasicBlock, Bottleneck, ResNet

from timm_gated import CifarResNet, GatedBasicBlock, GatedBottleneck, GatedCifarResNet, GatedResNet
from timm_gated.models import convnet_aig, dgnet, fbs, gated_resnet, gaternet, skipnet
from timm_gated.models._method import BUILD_OPTIONS

# Method, networks and blocks of each family.
FAMILIES = {
    'gated': ([gated_resnet.CHANNEL_GATING], [GatedResNet, GatedCifarResNet], [GatedBasicBlock, GatedBottleneck]),
    'dgnet': ([dgnet.METHOD], [GatedResNet], [GatedBasicBlock, GatedBottleneck]),
    'convnet_aig': (
        [convnet_aig.METHOD], [GatedResNet, GatedCifarResNet], [convnet_aig.AigBasicBlock, convnet_aig.AigBottleneck]),
    'skipnet': (
        list(skipnet.METHODS.values()), [skipnet.SkipResNet, skipnet.SkipCifarResNet],
        [skipnet.SkipBasicBlock, skipnet.SkipBottleneck]),
    'fbs': ([fbs.METHOD], [GatedResNet, GatedCifarResNet], [fbs.FbsBasicBlock]),
    'gaternet': (
        [gaternet.METHOD], [gaternet.GaterResNet, gaternet.GaterCifarResNet],
        [gaternet.GaterBasicBlock, gaternet.GaterBottleneck]),
}
METHODS = [(name, method) for name, (methods, _, _) in FAMILIES.items() for method in methods]


def with_default(cls: type) -> Set[str]:
    """Arguments of a class that have a default value."""
    parameters = inspect.signature(cls).parameters.items()
    return {name for name, parameter in parameters if parameter.default is not parameter.empty} - {'device', 'dtype'}


def added(cls: type, base: type) -> Set[str]:
    """Arguments of a class that `base` does not have, including those of the classes in between."""
    names: Set[str] = set()
    for between in cls.__mro__[:cls.__mro__.index(base)]:
        if '__init__' in vars(between):
            names |= with_default(between)
    return names - set(inspect.signature(base).parameters)


def test_every_family_is_listed():
    assert {family(name) for name in GATED} == set(FAMILIES)


@pytest.mark.parametrize('name, method', METHODS)
def test_gates_and_objectives(name, method):
    assert set(method.gate_options.values()) == with_default(method.gate_layer)
    assert all(
        option == f'gate_{argument.removesuffix("_channels")}' for option, argument in method.gate_options.items())
    objective_options = with_default(method.objective) if method.objective else set()
    assert set(method.objective_options) == objective_options


@pytest.mark.parametrize('name, method', METHODS)
def test_blocks_and_networks(name, method):
    _, networks, blocks = FAMILIES[name]
    for block in blocks:
        base = Bottleneck if issubclass(block, Bottleneck) else BasicBlock
        assert set(method.block_options) == added(block, base) - {'gate_layer'}
    for network in networks:
        base = ResNet if issubclass(network, ResNet) else CifarResNet
        # The builder sets the objective; SlimResNet, the dense counterpart of ResNets, has inner_channels too.
        assert set(method.network_options) == added(network, base) - {'objective', 'inner_channels'}


@pytest.mark.parametrize('name, method', METHODS)
def test_an_option_has_one_destination(name, method):
    options = [
        *method.gate_options, *method.objective_options, *method.block_options, *method.network_options, *BUILD_OPTIONS]
    assert len(set(options)) == len(options)
    dense = {*inspect.signature(ResNet).parameters, *inspect.signature(CifarResNet).parameters, 'inner_channels'}
    assert dense & set(options) == {'block', 'device', 'dtype'}


def test_arguments_of_timms_builder():
    assert set(inspect.signature(build_model_with_cfg).parameters) - {'kwargs'} <= set(BUILD_OPTIONS)


@pytest.mark.parametrize('name', ['gated_resnet20', 'gated_resnet18', 'skipnet_resnet38', 'gaternet_resnet20'])
@pytest.mark.parametrize('option', ['gama', 'gate_foo', 'hidden_channels', 'target_rate'])
def test_unknown_options(name, option):
    with pytest.raises(TypeError, match=option):
        timm.create_model(name, device='meta', **{option: 1})


def test_options_of_the_dense_counterpart():
    kwargs = dict(
        gate_bias=1., lam=0.1, gated_maps=(1,), budget=0.5, gather_gates=True, schedule_epochs=5, act_layer='silu',
        drop_rate=0.1, block_args=dict(gate_before_act=True, attn_layer='se'), features_only=False)
    model = timm.create_model('gated_resnet18', **kwargs)
    assert model.dense_variant == 'slim_resnet18'
    expected = dict(act_layer='silu', drop_rate=0.1, block_args=dict(attn_layer='se'))
    assert model.dense_args == expected
    dense = timm.create_model(model.dense_variant, **model.dense_args)
    assert type(dense.layer1[0].se) is type(model.layer1[0].se) is not type(None)
