"""Layers as operations of a program

Batch norm is folded into convolutions and gates. A layer that is not supported raises a `ValueError` with its name.
"""
from typing import Any, Callable, Dict, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import BlurPool2d, EcaModule, SEModule, Sigmoid
from torchvision.ops import FrozenBatchNorm2d

from ..layers import ChannelGate
from ..models import AigGate
from .program import BlurOp, ConvOp, GateOp, PoolOp
from .sliced import binomial

__all__ = ['NORMS', 'blur_op', 'check_attention', 'conv_op', 'fold', 'gate_op', 'pool_op', 'unsupported']

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, FrozenBatchNorm2d)


def unsupported(module: nn.Module, why: str = '') -> ValueError:
    """Return the error for a module that cannot be compiled.

    Args:
        module: The module.
        why: Reason, which continues the sentence.
    """
    return ValueError(
        f'{type(module).__name__}({module.extra_repr()}) cannot be accelerated{why}. Supported: ResNets with batch '
        'norm and ReLU, gated or dense, optionally with grouped convolutions, SE or ECA attention, and blur or average '
        'pooling against aliasing.')


def check_attention(module: Any) -> None:
    """Raise a `ValueError` for attention other than SE with ReLU and ECA, or with another gate than a sigmoid."""
    if type(module) is SEModule:
        is_supported = not module.add_maxpool and type(module.act) is nn.ReLU
    else:
        is_supported = type(module) is EcaModule and module.conv2 is None
    if not is_supported or type(module.gate) not in (nn.Sigmoid, Sigmoid):
        raise unsupported(module, ' with these options' if type(module) in (SEModule, EcaModule) else '')


def _single(value: Any, module: nn.Module) -> int:
    """The value of an option that must be the same in all dimensions."""
    values = set(value) if isinstance(value, tuple) else {value}
    if len(values) != 1 or not all(isinstance(v, int) for v in values):
        raise unsupported(module)
    return values.pop()


def conv_op(module: nn.Conv2d, source: int, target: int) -> ConvOp:
    """Return a convolution as an operation between two maps."""
    if type(module) is not nn.Conv2d or module.padding_mode != 'zeros':
        raise unsupported(module)
    _single(module.kernel_size, module)
    weight = module.weight.detach().clone()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach().clone()
    return ConvOp(
        source, target, weight, bias,
        stride=_single(module.stride, module),
        dilation=_single(module.dilation, module),
        padding=_single(module.padding, module),
        groups=module.groups,
    )


def fold(conv: ConvOp, norm: Any) -> None:
    """Fold batch norm into the convolution before it. In place."""
    if type(norm) not in NORMS or norm.running_mean is None:
        raise unsupported(norm)
    # Fold in double precision to lose no accuracy.
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    conv.weight = (conv.weight.double() * scale[:, None, None, None]).to(conv.weight.dtype)
    conv.bias = (conv.bias.double() * scale + shift).to(conv.bias.dtype)


# Last layer by gate class. Subclasses are not supported because they may compute other logits.
_LAST_LAYERS: Dict[type, Callable[[Any], Tuple[torch.Tensor, torch.Tensor]]] = {
    ChannelGate: lambda gate: (gate.fc2.weight.detach().clone(), gate.fc2.bias.detach().clone()),
    AigGate: lambda gate: tuple(
        tensor.detach()[1::2] - tensor.detach()[0::2] for tensor in (gate.fc2.weight, gate.fc2.bias)),
}


def gate_op(gate: Any, source: int, number: int) -> GateOp:
    """Return a gate as an operation.

    Args:
        gate: The gate.
        source: Map that it reads.
        number: Number of the gate in the program.
    """
    if type(gate) not in _LAST_LAYERS:
        raise unsupported(gate)
    as_conv = ConvOp(source, source, gate.fc1.weight.detach()[:, :, None, None], gate.fc1.bias.detach())
    fold(as_conv, gate.bn)
    weight2, bias2 = _LAST_LAYERS[type(gate)](gate)
    if gate.forced is not None:
        if gate.forced.ndim != 1:
            raise ValueError('per-image forced masks cannot be accelerated; force the same mask for all images.')
        weight2, bias2 = torch.zeros_like(weight2), gate.forced.to(bias2) - 0.5
    # Ungated filters become filters with an always open gate.
    weight2 = torch.cat((weight2, weight2.new_zeros(gate.num_ungated, weight2.shape[1])))
    bias2 = torch.cat((bias2, bias2.new_ones(gate.num_ungated)))
    macs = gate.fc1.weight.numel() + gate.fc2.weight.numel()
    return GateOp(source, number, as_conv.weight[:, :, 0, 0], as_conv.bias, weight2, bias2, macs)


def blur_op(module: Any, source: int, target: int, name: str) -> BlurOp:
    """Return blur pooling as an operation between two maps."""
    if type(module) is not BlurPool2d or module.pad_mode != 'reflect':
        raise unsupported(module, f' with {module.pad_mode} padding')
    filt: Any = module.filt
    coefficients, actual = binomial(module.filt_size), filt.cpu()
    if not torch.equal(actual, torch.outer(coefficients, coefficients).to(actual.dtype).expand_as(actual)):
        raise unsupported(module, ' with a filter of its own')
    return BlurOp(source, target, module.filt_size, module.stride, _single(tuple(module.padding), module), name)


def pool_op(module: Union[nn.MaxPool2d, nn.AvgPool2d], source: int, target: int) -> PoolOp:
    """Return pooling as an operation between two maps."""
    average = isinstance(module, nn.AvgPool2d)
    padding = _single(module.padding, module)
    if type(module) not in (nn.MaxPool2d, nn.AvgPool2d) or getattr(module, 'divisor_override', None) is not None \
            or _single(getattr(module, 'dilation', 1), module) != 1 \
            or (average and module.count_include_pad and (padding or module.ceil_mode)):
        raise unsupported(module)
    return PoolOp(
        source, target, average,
        _single(module.kernel_size, module), _single(module.stride, module), padding, module.ceil_mode)
