"""Inputs of accelerated networks: layouts, dtypes, invalid inputs, concurrent calls"""
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from accelerated import backends, check, images
from nets import shuffle

from timm_gated import accelerate


def network(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model('gated_resnet20', **kwargs)).eval()


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """A copy whose address is not a multiple of 4."""
    memory = np.zeros(x.numel() * 4 + 1, dtype=np.uint8)[1:]
    array = memory.view(np.float32).reshape(x.shape)
    array[:] = x.numpy()
    return torch.from_numpy(array)


LAYOUTS = {
    'channels last': lambda x: x.to(memory_format=torch.channels_last),
    'rows of a larger image': lambda x: x.repeat(1, 1, 2, 1)[:, :, :32],
    'every second column': lambda x: x.repeat_interleave(2, 3)[..., ::2],
    'transposed': lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    'channels of a larger image': lambda x: x.repeat(1, 2, 1, 1)[:, 3:],
    'samples apart': lambda x: x.repeat_interleave(2, 0)[1::2],
    'with an offset': lambda x: torch.cat([x[:1], x])[1:],
    'misaligned': misaligned,
    'negated': lambda x: torch._neg_view(-x),
    'a parameter': nn.Parameter,
}


@backends
@pytest.mark.parametrize('layout', LAYOUTS)
def test_layouts(layout, backend, isa):
    fast = accelerate(network(), backend, isa)
    x = images(4, 32, 32)
    output = fast(LAYOUTS[layout](x))
    assert not output.requires_grad
    torch.testing.assert_close(output, fast(x))


@backends
def test_expanded_images(backend, isa):
    fast = accelerate(network(), backend, isa)
    x = images(1, 32, 1)
    torch.testing.assert_close(fast(x.expand(3, 3, 32, 32)), fast(x.repeat(3, 1, 1, 32)))


@backends
@pytest.mark.parametrize('kwargs', [{}, dict(num_classes=0), dict(features_only=True)])
def test_no_images(kwargs, backend, isa):
    check(network(**kwargs), images(0, 32, 31), backend, isa)


@backends
@pytest.mark.parametrize('value', [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_do_not_affect_other_images(value, backend, isa):
    fast = accelerate(network(), backend, isa)
    x = images(3, 32, 32)
    expected = fast(x)
    x[1, 0, 5, 7] = value
    output = fast(x)
    assert not output[1].isfinite().all()
    assert torch.equal(output[::2], expected[::2])


@pytest.mark.parametrize('kwargs', [{}, dict(features_only=True)])
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_native_computes_in_single_precision(dtype, kwargs):
    fast = accelerate(network(**kwargs), 'native')
    x = images(2, 32, 32).to(dtype)
    outputs, single = fast(x), fast(x.float())
    if not kwargs:
        outputs, single = [outputs], [single]
    for ours, theirs in zip(outputs, single, strict=True):
        assert ours.dtype == dtype
        # the head gets features in the dtype of the images
        torch.testing.assert_close(ours.float(), theirs, atol=0.01, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_networks_and_images_of_different_dtypes(dtype):
    fast = accelerate(network().to(dtype), 'native')
    x = images(2, 32, 32)
    single, same = fast(x), fast(x.to(dtype))
    assert single.dtype == torch.float32 and same.dtype == dtype
    torch.testing.assert_close(same.float(), single, atol=0.05, rtol=0.05)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_native_ignores_the_default_dtype(dtype):
    fast = accelerate(network(), 'native')
    x = images(2, 32, 32)
    expected = fast.forward_features(x)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(fast.forward_features(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@backends
@pytest.mark.parametrize('x, message', [
    (torch.zeros(3, 32, 32), r'\[N, 3, H, W\] and at least one pixel, got \(3, 32, 32\)'),
    (torch.zeros(1, 1, 3, 32, 32), r'got \(1, 1, 3, 32, 32\)'),
    (torch.zeros(1, 1, 32, 32), r'got \(1, 1, 32, 32\)'),
    (torch.zeros(2, 0, 32, 32), r'got \(2, 0, 32, 32\)'),
    (torch.zeros(1, 3, 0, 32), r'got \(1, 3, 0, 32\)'),
    (torch.zeros(1, 3, 32, 0), r'got \(1, 3, 32, 0\)'),
    (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), 'floating point, got torch.uint8'),
    (torch.zeros(1, 3, 32, 32, dtype=torch.complex64), 'floating point, got torch.complex64'),
    (torch.zeros(1, 3, 32, 32).to_sparse(), 'a dense tensor, got torch.sparse_coo'),
    (np.zeros((1, 3, 32, 32), np.float32), 'a dense tensor, got ndarray'),
    (None, 'a dense tensor, got NoneType'),
], ids=['3D', '5D', 'grey', 'no channels', 'no rows', 'no columns', 'bytes', 'complex', 'sparse', 'array', 'nothing'])
def test_bad_images(x, message, backend, isa):
    fast = accelerate(timm.create_model('gated_resnet20'), backend, isa)
    with pytest.raises(ValueError, match=message):
        fast(x)


def test_native_refuses_images_on_other_devices():
    with pytest.raises(ValueError, match="on 'meta'"):
        accelerate(timm.create_model('gated_resnet20'), 'native')(torch.zeros(1, 3, 32, 32, device='meta'))


def test_torch_refuses_images_and_weights_of_different_dtypes():
    with pytest.raises(RuntimeError, match='Half.*should be the same'):
        accelerate(network(), 'torch')(images(1, 32, 32).half())


@pytest.mark.parametrize('threads', [1, 2])
def test_calls_from_several_threads(threads):
    """Two callers per image size: callers share plans, and plans are created and evicted while others run."""
    model = network()
    inputs = [images(1 + i % 3, 32, 24 + i // 2) for i in range(12)]
    expected = [accelerate(model, 'native')(x) for x in inputs]
    fast = accelerate(model, 'native')

    def same_every_time(index: int) -> bool:
        return all(torch.equal(fast(inputs[index]), expected[index]) for _ in range(10))

    torch.set_num_threads(threads)
    try:
        with ThreadPoolExecutor(len(inputs)) as pool:
            assert all(pool.map(same_every_time, range(len(inputs))))
    finally:
        torch.set_num_threads(1)


def test_networks_created_in_several_threads():
    model, x = network(), images(2, 32, 32)
    expected = accelerate(model, 'native')(x)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: accelerate(model, 'native')(x), range(12)))
    assert all(torch.equal(output, expected) for output in outputs)
