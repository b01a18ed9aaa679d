"""The plan of an accelerated network: layers, algorithms, MACs and times"""
import pytest
import timm
import torch
from nets import shuffle

from timm_gated import accelerate, count_macs


def make(name: str = 'gated_resnet50', **kwargs) -> torch.nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **kwargs)).eval()


def test_layers_macs_and_times():
    model = make(layers=(1, 1, 1, 1), num_classes=0)
    image = torch.randn(1, 3, 64, 64)
    plan = accelerate(model, 'native').plan(image, runs=3)
    convs = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)}
    by_name = {layer.name: layer for layer in plan.layers if layer.name}
    assert convs <= set(by_name)
    assert {layer.algorithm for layer in plan.layers if not layer.name} == {''}
    assert by_name['layer1.0.conv1'].algorithm == 'pointwise' and by_name['conv1'].algorithm == 'direct'
    assert by_name['layer1.0.conv2'].algorithm.startswith('winograd')
    counted = count_macs(model, image)
    assert plan.macs == counted.per_sample.item() == sum(layer.macs for layer in plan.layers)
    assert by_name['layer2.0.conv2'].macs == counted.by_module['layer2.0.conv2'].per_sample.item()
    assert all(layer.milliseconds > 0 for layer in by_name.values()) and plan.input_size == (3, 64, 64)
    lines = str(plan).splitlines()
    assert len(lines) == len(plan.layers) + 3 and lines[-1].startswith('total') and lines[1].startswith('layer')


def test_the_size_of_the_last_call_is_the_default():
    fast = accelerate(make('gated_resnet20'), 'native')
    with pytest.raises(ValueError, match='has not been run yet'):
        fast.plan()
    fast(torch.randn(2, 3, 40, 32))
    assert fast.plan(runs=1).input_size == (3, 40, 32)


@pytest.mark.parametrize('image, runs, message', [
    (torch.randn(2, 3, 32, 32), 1, 'one image, got a batch of 2'),
    (torch.randn(1, 4, 32, 32), 1, r'shape \[N, 3, H, W\]'),
    (torch.randn(1, 3, 32, 32), 0, 'runs .* got 0'),
])
def test_wrong_arguments(image, runs, message):
    with pytest.raises(ValueError, match=message):
        accelerate(make('gated_resnet20'), 'native').plan(image, runs)


def test_the_torch_backend_has_no_plan():
    with pytest.raises(ValueError, match="the backend is 'torch'"):
        accelerate(make('gated_resnet20'), 'torch').plan(torch.randn(1, 3, 32, 32))
