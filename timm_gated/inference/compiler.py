"""Compiler: gated residual networks to programs

Batch norm is folded into convolutions and gates, dropout is dropped, and the gates of a block run before its
convolutions. A module that cannot be compiled raises a `ValueError` with its name.
"""
from functools import singledispatch
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import BlurPool2d, EcaModule, SelectAdaptivePool2d

from ..layers import GatedConvs
from ..models import PadShortcut
from .layer_ops import NORMS, blur_op, check_attention, conv_op, fold, gate_op, pool_op, unsupported
from .program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConvOp,
    Op,
    OutputOp,
    PoolOp,
    Program,
    ScaleOp,
    SkipOp,
    SubsampleOp,
)
from .trunks import is_known

__all__ = ['Compiler', 'compile_module', 'compile_trunk', 'is_plain_classifier', 'is_plain_conv', 'sequence']

def compile_trunk(modules: Iterable[Tuple[nn.Module, bool]], names: Optional[Mapping[int, str]] = None) -> Program:
    """Compile the modules of a trunk.

    Args:
        modules: Modules in execution order, each with a flag that says whether its output is returned.
        names: Names of layers by id, for the plan of an accelerated network.
    """
    compiler = Compiler(names or {})
    with torch.no_grad():
        for module, is_output in modules:
            compiler.add(module)
            if is_output:
                compiler.add_output()
    return compiler.finish()


# Maps: the image, two that blocks alternately read and write, those between the convolutions, the shortcut's, and two
# that attention alternately reads and writes.
_IMAGE, _FIRST, _SECOND, _INNER1, _INNER2, _SHORTCUT, _POOLED, _FACTORS1, _FACTORS2 = range(9)


class Compiler:
    """Appends the operations of modules to a program.

    Attributes:
        ops: Operations so far.
        current: Map that the next operation reads.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.ops: List[Op] = []
        self.current = _IMAGE
        self._names = names
        self._num_maps = 9
        self._reuses_maps = True
        self._pending: Optional[ConvOp] = None  # a convolution that a norm and a ReLU may follow
        self._gates: Dict[int, int] = {}  # gate numbers by id of the module

    def finish(self) -> Program:
        self.flush()
        first = next(op for op in self.ops if isinstance(op, ConvOp))
        return Program(first.weight.shape[1] * first.groups, self.ops, self._num_maps, len(self._gates))

    def keep_maps(self) -> None:
        """Give every following operation a map of its own, so that all of them can be read later."""
        self.flush()
        self._reuses_maps = False

    def flush(self) -> None:
        if self._pending is not None:
            self.ops.append(self._pending)
            self._pending = None

    def add_output(self) -> None:
        self.flush()
        self.ops.append(OutputOp(self.current))

    def add(self, module: nn.Module) -> None:
        for leaf in _leaves(module):
            if isinstance(leaf, nn.Conv2d):
                self.flush()
                self._pending = self._conv(leaf, self.current, self.advance())
            elif type(leaf) in NORMS and self._pending is not None and not self._pending.relu:
                fold(self._pending, leaf)
            elif type(leaf) is nn.ReLU and self._pending is not None:
                self._pending.relu = True
            elif isinstance(leaf, (nn.MaxPool2d, nn.AvgPool2d, BlurPool2d)):
                self.flush()
                self.ops.append(self._pool(leaf, self.current, self.advance()))
            elif hasattr(leaf, 'conv1') and hasattr(leaf, 'conv2'):
                self.flush()
                self._add_block(leaf)
            else:
                self.flush()
                compile_module(leaf, self)

    def advance(self) -> int:
        """Return the map that the next operation writes. It becomes the current one."""
        if self._reuses_maps:
            self.current = _SECOND if self.current == _FIRST else _FIRST
        else:
            self.current = self._num_maps
            self._num_maps += 1
        return self.current

    def _add_block(self, block: Any) -> None:
        _check_block(block)
        source, target = self.current, self.advance()
        names = [name for name in ('conv1', 'conv2', 'conv3') if hasattr(block, name)]
        switches = getattr(block, 'gated_convs', {})
        for gate in dict.fromkeys(gate for name in names for gate in switches.get(name, ()) if gate is not None):
            op = gate_op(gate, source, self._number(gate))
            op.name = self.name(gate)
            self.ops.append(op)
        residual = self._add_shortcut(block.downsample, source)
        pool, attention = (_option(block, name) for name in ('aa', 'se'))
        if _is_block_gated(names, switches):
            for module in filter(None, (pool, attention)):
                raise unsupported(module, ' in a block that is skipped as a unit')
            self.ops.append(SkipOp(residual, target, self._number(switches[names[0]][1]), len(names)))
            switches = {}
        if any(switches.get(name, (None, None))[side] is not None for name, side in ((names[0], 0), (names[-1], 1))):
            raise unsupported(block, ' because a gate masks its input or its output')
        at = source
        for name in names:
            is_last = name == names[-1]
            to = target if is_last and attention is None else _other_inner(at)
            conv = self._conv(getattr(block, name), at, to)
            fold(conv, getattr(block, name.replace('conv', 'bn')))
            gate_in, gate_out = switches.get(name, (None, None))
            conv.gate_in = None if gate_in is None else self._number(gate_in)
            conv.gate_out = None if gate_out is None else self._number(gate_out)
            conv.relu = to == target or not is_last
            conv.residual = residual if to == target else None
            self.ops.append(conv)
            at = to
            if name == names[-2] and pool is not None:
                at = _other_inner(to)
                self.ops.append(self._pool(pool, to, at))
        if attention is not None:
            self._add_attention(attention, at, target, residual)

    def _add_attention(self, module: nn.Module, source: int, target: int, residual: int) -> None:
        check_attention(module)
        self.ops.append(AdaptivePoolOp(source, _FACTORS1, 1))
        factors = _FACTORS1
        if isinstance(module, EcaModule):
            factors = _FACTORS2
            weight: Any = module.conv.weight
            op = ChannelConvOp(_FACTORS1, factors, weight.detach()[0, 0].clone(), self.name(module.conv))
            self.ops.append(op)
        else:
            layers: Any = (module.fc1, module.bn), (module.fc2, None)
            for (conv, norm), to in zip(layers, (_FACTORS2, _FACTORS1), strict=True):
                layer = self._conv(conv, factors, to)
                if norm is not None and not isinstance(norm, nn.Identity):
                    fold(layer, norm)
                layer.relu = to == _FACTORS2
                self.ops.append(layer)
                factors = to
        self.ops.append(ScaleOp(source, factors, target, residual, relu=True))

    def _pool(self, module: nn.Module, source: int, target: int) -> Union[PoolOp, BlurOp]:
        if isinstance(module, BlurPool2d):
            return blur_op(module, source, target, self.name(module))
        if isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)):
            return pool_op(module, source, target)
        raise unsupported(module)

    def _add_shortcut(self, downsample: Optional[nn.Module], source: int) -> int:
        conv = None
        for leaf in _leaves(downsample) if downsample is not None else ():
            if isinstance(leaf, nn.AvgPool2d):
                self.ops.append(pool_op(leaf, source, _POOLED))
                source = _POOLED
            elif isinstance(leaf, nn.Conv2d) and conv is None:
                conv = self._conv(leaf, source, _SHORTCUT)
                self.ops.append(conv)
                source = _SHORTCUT
            elif type(leaf) in NORMS and conv is not None:
                fold(conv, leaf)
            elif isinstance(leaf, PadShortcut):
                self.ops.append(SubsampleOp(source, _SHORTCUT, leaf.stride, *leaf.padding[4:]))
                source = _SHORTCUT
            else:
                raise unsupported(leaf)
        return source

    def name(self, module: nn.Module) -> str:
        """Return the name of a module in the network, empty if it is not known."""
        return self._names.get(id(module), '')

    def _conv(self, module: nn.Conv2d, source: int, target: int) -> ConvOp:
        op = conv_op(module, source, target)
        op.name = self.name(module)
        return op

    def _number(self, gate: nn.Module) -> int:
        return self._gates.setdefault(id(gate), len(self._gates))


@singledispatch
def compile_module(module: nn.Module, compiler: Compiler) -> None:
    """Compile a module that is not a layer or a residual block. Other packages may register theirs.

    Args:
        module: Module to compile.
        compiler: Compiler to append its operations to.
    """
    raise unsupported(module)


@compile_module.register
def _(module: SelectAdaptivePool2d, compiler: Compiler) -> None:
    compiler.ops.append(AdaptivePoolOp(compiler.current, compiler.advance(), 1))


@compile_module.register
def _(module: nn.Linear, compiler: Compiler) -> None:
    weight = module.weight.detach().clone()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach().clone()
    op = ConvOp(compiler.current, compiler.advance(), weight[:, :, None, None], bias)
    op.name = compiler.name(module)
    compiler.ops.append(op)


def is_plain_classifier(head: Optional[nn.Module]) -> bool:
    """Whether a head is average pooling, optionally followed by a linear layer."""
    if not isinstance(head, nn.Sequential) or len(head) != 2:
        return False
    pooling, linear = head
    return (
        type(pooling) is SelectAdaptivePool2d and pooling.pool_type == 'avg'
        and not isinstance(pooling.flatten, nn.Identity) and type(linear) in (nn.Linear, nn.Identity))


@singledispatch
def sequence(module: nn.Module) -> Optional[Iterable[nn.Module]]:
    """Return the children that a module runs one after another, or None. Other packages may register theirs."""
    return None


@sequence.register
def _(module: nn.Sequential) -> Optional[Iterable[nn.Module]]:
    return module if is_known(module) else None


def is_plain_conv(module: nn.Module) -> bool:
    """Whether a module is a convolution, optionally with batch norm and ReLU, that can be compiled."""
    conv, *others = _leaves(module)
    return (
        type(conv) is nn.Conv2d and conv.padding_mode == 'zeros'
        and all(len(set(size)) == 1 for size in (conv.kernel_size, conv.stride, conv.dilation))
        and isinstance(conv.padding, tuple) and len(set(conv.padding)) == 1
        and [type(other) for other in others] in ([], *([norm] for norm in NORMS), [nn.ReLU],
                                                  *([norm, nn.ReLU] for norm in NORMS)))


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    children = sequence(module)
    if children is not None:
        for child in children:
            yield from _leaves(child)
    elif not isinstance(module, (nn.Identity, nn.Dropout)):
        yield module


def _is_block_gated(names: Sequence[str], switches: GatedConvs) -> bool:
    """Whether a single gate masks all outputs of all convolutions of a block."""
    pairs = {switches.get(name, (None, None)) for name in names}
    return len(pairs) == 1 and all(gate_in is None and gate_out is not None for gate_in, gate_out in pairs)


def _other_inner(number: int) -> int:
    """Map that an operation within a block writes if it reads this one."""
    return _INNER2 if number == _INNER1 else _INNER1


def _option(block: nn.Module, name: str) -> Optional[nn.Module]:
    """A module that some blocks of timm have."""
    module = getattr(block, name, None)
    return None if isinstance(module, nn.Identity) else module


def _check_block(block: Any) -> None:
    if not is_known(block):
        raise unsupported(block, ' because its forward pass is not known')
    if _option(block, 'drop_block') is not None:
        raise unsupported(block.drop_block)
    for name in ('act1', 'act2', 'act3', 'relu'):
        module = getattr(block, name, None)
        if module is not None and type(module) is not nn.ReLU:
            raise unsupported(module)
    if getattr(block, 'with_plugins', False):  # option of mmseg
        raise unsupported(block, ' with plugins')
