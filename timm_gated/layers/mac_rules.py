"""MACs of torch calls, by operator name

Counted are convolutions, linear layers, recurrent layers and the projections of attention. Other matrix products are
recognised, but not counted.

`open_pairs` says which part of a gated convolution runs.
"""
import inspect
import math
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._ops import OpOverloadPacket

__all__ = ['MAC_RULES', 'PARTLY_COUNTED', 'POOLING', 'num_mapped', 'open_pairs', 'operator_name']


def operator_name(func: Any) -> str:
    """Name of a torch function. Operators of `torch.ops` outside aten and torchvision have an empty name."""
    packet = getattr(func, 'overloadpacket', func)
    if not isinstance(packet, OpOverloadPacket):
        return getattr(func, '__name__', '')
    namespace, _, name = packet._qualified_op_name.partition('::')
    return name if namespace in ('aten', 'torchvision') else ''


def num_mapped(x: torch.Tensor) -> int:
    """Number of inputs that a call within `torch.vmap` maps over, from its output."""
    count = 1
    while is_functorch_wrapped_tensor(x):
        inner = get_unwrapped(x)
        count, x = count * inner.numel() // max(x.numel(), 1), inner
    return count


def open_pairs(masks: Sequence[torch.Tensor], groups: int = 1) -> Tuple[torch.Tensor, int]:
    """Pairs of an open input and an open output of a convolution that are in the same group: per sample, and in all.

    Every pair costs the same MACs. The result has the dtype of the masks and is differentiable in them.

    Args:
        masks: Masks of the convolution's inputs, of its outputs or of both, [N, decisions] each, always open channels
            included. Each decision switches an equal share of the channels, in their order.
        groups: Number of groups of the convolution.
    """
    if len(masks) == 1:  # every channel is in equally many pairs
        return masks[0].sum(1), masks[0].shape[1]
    total = 1
    by_group = []
    for mask in masks:
        mask = mask.repeat_interleave(groups // math.gcd(groups, mask.shape[1]), dim=1)
        by_group.append(mask.unflatten(1, (groups, -1)).sum(2))
        total *= mask.shape[1]
    return math.prod(by_group).sum(1), total // groups


def _conv(output: torch.Tensor, /, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return output.numel() * math.prod(weight.shape[1:])


def _conv_transpose(
        output: torch.Tensor, /, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return input.numel() * math.prod(weight.shape[1:])


def _convolution(
        output: torch.Tensor, /, input: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any,
        dilation: Any, transposed: bool, *args: Any, **kwargs: Any) -> int:
    return (_conv_transpose if transposed else _conv)(output, input, weight)


def _linear(output: torch.Tensor, /, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    return output.numel() * weight.shape[-1]


def _applied(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """MACs of matrices that are applied to every feature vector."""
    return x.numel() // x.shape[-1] * sum(weight.numel() for weight in weights if weight.ndim == 2)


def _rnn(output: Any, /, input: torch.Tensor, *args: Any) -> int:
    return _applied(input, next(arg for arg in args if isinstance(arg, list)))


def _rnn_cell(output: Any, /, input: torch.Tensor, hx: Any, *weights: Any) -> int:
    return _applied(input, weights[:2])


def _attention(output: Any, /, *args: Any, **kwargs: Any) -> int:
    call = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    if call.get('use_separate_proj_weight'):
        weights = [call[f'{name}_proj_weight'] for name in 'qkv']
    else:
        weights = call['in_proj_weight'].chunk(3)
    inputs = call['query'], call['key'], call['value'], call['query']
    return sum(_applied(x, [weight]) for x, weight in zip(inputs, (*weights, call['out_proj_weight']), strict=True))


def _uncounted(output: Any, /, *args: Any, **kwargs: Any) -> None:
    return None


# Functions from the output and the arguments of a call to its MACs, or None for products that are not counted.
MAC_RULES: Dict[str, Callable[..., Optional[int]]] = {
    **{f'conv{n}d': _conv for n in (1, 2, 3)},
    **{f'conv_transpose{n}d': _conv_transpose for n in (1, 2, 3)},
    **dict.fromkeys(('convolution', '_convolution'), _convolution),
    'deform_conv2d': _conv,
    'linear': _linear,
    **dict.fromkeys(('lstm', 'gru', 'rnn_tanh', 'rnn_relu'), _rnn),
    **dict.fromkeys(('lstm_cell', 'gru_cell', 'rnn_tanh_cell', 'rnn_relu_cell'), _rnn_cell),
    'multi_head_attention_forward': _attention,
    **dict.fromkeys((
        'scaled_dot_product_attention', 'matmul', '__rmatmul__', 'linalg_matmul', 'mm', 'addmm', 'addmm_', 'bmm',
        'addbmm', 'addbmm_', 'baddbmm', 'baddbmm_', 'mv', 'addmv', 'addmv_', 'inner', 'einsum', 'tensordot', 'bilinear',
        'chain_matmul', 'linalg_multi_dot', 'matrix_power', 'linalg_matrix_power', 'dot', 'vdot', 'linalg_vecdot',
        '_sparse_mm', 'smm', 'sspaddmm', '_scaled_mm', '_int_mm', 'conv_tbc'), _uncounted),
}
PARTLY_COUNTED = {'multi_head_attention_forward'}  # only its projections
POOLING = {'mean', *(f'{kind}avg_pool{n}d' for kind in ('', 'adaptive_') for n in (1, 2, 3))}
