"""Conditional ONNX: programs as graphs of standard operators that compute only open filters

A gate becomes the list of its open channels (`NonZero`). A gated convolution gathers the rows of its weight that the
gate of its outputs has open, and the columns that the gate of its inputs has open. A block that is skipped as a unit is
an `If`. `Scan` runs the images of a batch one after another, since each image has its own open channels.

Every gate has one channel more than the network, which is always open and whose weights are zero: ONNX Runtime does not
return from a convolution without input channels.

The graph is written for ONNX Runtime, whose gathers are slow if they copy small pieces. Weights are stored so that the
pieces are large: 1 x 1 convolutions of gated inputs are matrix products of transposed weights, and 3 x 3 convolutions
on small maps are transposed convolutions, whose weights have the inputs first. Gates that are always open are left out.

The groups of an ONNX convolution have the same number of channels, whereas open channels differ. A gated convolution
with groups therefore computes all of its filters, from a map with zeros in the closed channels. Its neighbours, which
have most of the weights of a ResNeXt, compute open filters only.
"""
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn.functional as F

from .cost import output_shape
from .onnx_graph import GraphWriter
from .program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConcatOp,
    ConvOp,
    GateOp,
    OutputOp,
    PoolOp,
    Program,
    ScaleOp,
    SkipOp,
    SubsampleOp,
)
from .sliced import binomial

__all__ = ['write_program']

# A convolution of gated inputs is transposed if it has more weights than this per element of its output: a transposed
# convolution gathers faster, but adds up one map per element of the kernel.
_MOST_WEIGHTS = 32

_Shape = Tuple[int, int, int]  # channels, height and width


def write_program(
        program: Program,
        height: int,
        width: int,
        flat: bool,
        names: Sequence[str],
        opset: int,
) -> Any:
    """Return a program as an ONNX model with the input `images`, a batch of any size except 0.

    Args:
        program: Program with float32 weights.
        height: Height of the images.
        width: Width of the images.
        flat: Whether outputs of one pixel are returned without their height and width.
        names: Names of the outputs.
        opset: ONNX opset version.
    """
    writer = _Writer(program, height, width)
    writer.run()
    shapes = [shape[:1] if flat else shape for shape in (output.shape for output in writer.outputs)]
    values = [
        writer.graph('Reshape', output.name, writer.graph.constant(shape))
        for output, shape in zip(writer.outputs, shapes, strict=True)]
    outputs = dict(zip(names, zip(values, shapes, strict=True), strict=True))
    return writer.graph.model_per_image(
        ('images', ('batch', program.in_channels, height, width)), 'image', outputs, opset)


@dataclass
class _Map:
    """A map in the graph.

    Attributes:
        name: Name of the value, a batch of 1.
        shape: Its shape if all channels are open.
    """
    name: str
    shape: _Shape


@dataclass
class _Gate:
    """A gate in the graph. Values that nothing reads are not written.

    Attributes:
        indices: Name of the indices of the open channels.
        is_open: Name of a boolean, whether the only channel of the gate is open.
    """
    indices: str = ''
    is_open: str = ''


class _Writer:
    """Writes the operations of a program into a graph.

    Attributes:
        graph: Graph so far.
        outputs: Outputs so far.
    """

    def __init__(self, program: Program, height: int, width: int) -> None:
        self.graph = GraphWriter()
        self.outputs: List[_Map] = []
        self._ops = list(program.ops)
        image = self.graph('Unsqueeze', 'image', self.graph.constant([0]))
        self._maps = {0: _Map(image, (program.in_channels, height, width))}
        self._gates: Dict[Optional[int], Optional[_Gate]] = {None: None}  # None: all channels are always open
        self._pooled: Dict[str, str] = {}  # by name of the map
        convs = [op for op in self._ops if isinstance(op, ConvOp)]
        self._selecting: Set[Optional[int]] = {gate for op in convs for gate in (op.gate_in, op.gate_out)}
        self._skipping = {op.gate for op in self._ops if isinstance(op, SkipOp)}

    def run(self) -> None:
        ops = iter(self._ops)
        for op in ops:
            if isinstance(op, GateOp):
                self._gates[op.gate] = self._gate(op)
            elif isinstance(op, SkipOp):
                self._skip(op, [next(ops) for _ in range(op.count)])
            elif isinstance(op, OutputOp):
                self.outputs.append(self._maps[op.source])
            else:
                self._compute(op)

    def _compute(self, op: Any) -> str:
        """Write an operation with one result, which becomes a map."""
        sources = [self._maps[source] for source in getattr(op, 'sources', None) or (op.source,)]
        shape = output_shape(op, *(source.shape for source in sources))
        reflects = op.padding if isinstance(op, BlurOp) else 0  # pixels next to the border
        if min(shape) < 1 or reflects >= min(sources[0].shape[1:]):
            height, width = self._maps[0].shape[1:]
            raise ValueError(f'images of {height} x {width} are too small: a map would have {shape[1]} x {shape[2]}.')
        name = _WRITERS[type(op)](self, op, *sources, shape)
        self._maps[op.target] = _Map(name, shape)
        return name

    def _gate(self, op: GateOp) -> Optional[_Gate]:
        if not op.weight2.any() and (op.bias2 > 0).all():
            return None
        graph, source, zero = self.graph, self._maps[op.source].name, self.graph.constant([0])
        if source not in self._pooled:
            self._pooled[source] = graph('Flatten', graph('GlobalAveragePool', source))
        hidden = graph('Gemm', self._pooled[source], *self._constants(op.weight1, op.bias1), transB=1)
        weight, bias = F.pad(op.weight2, (0, 0, 0, 1)), F.pad(op.bias2, (0, 1), value=1.)
        logits = graph('Gemm', graph('Relu', hidden), *self._constants(weight, bias), transB=1)
        mask = graph('Squeeze', graph('Greater', logits, graph.constant(torch.zeros(()))), zero)
        return _Gate(
            indices=graph('Squeeze', graph('NonZero', mask), zero) if op.gate in self._selecting else '',
            is_open=graph('Gather', mask, graph.constant(0)) if op.gate in self._skipping else '')

    def _constants(self, *tensors: torch.Tensor) -> Tuple[str, ...]:
        return tuple(self.graph.constant(tensor) for tensor in tensors)

    def _skip(self, op: SkipOp, skipped: Sequence[Any]) -> None:
        def run() -> str:
            return [self._compute(conv) for conv in skipped][-1]

        source, gate = self._maps[op.source], self._gates[op.gate]
        if gate is None:
            run()
            return
        name = self.graph.choose(
            gate.is_open, run, lambda: self.graph('Relu', source.name), (1, *source.shape))
        self._maps[op.target] = _Map(name, source.shape)

    def _conv(self, op: ConvOp, source: _Map, shape: _Shape) -> str:
        gate_in, gate_out = self._gates[op.gate_in], self._gates[op.gate_out]
        if op.groups > 1:
            name = self._grouped_conv(op, gate_in, gate_out, source)
        elif gate_in is not None and gate_out is None and _is_product(op):
            name = self._product(op, gate_in, source, shape)
        elif gate_in is not None and gate_out is None and _is_transposed(op, shape):
            name = self._transposed_conv(op, gate_in, source)
        else:
            name = self._plain_conv(op, gate_in, gate_out, source)
        return self._end(op, name, shape)

    def _end(self, op: Union[ConvOp, ScaleOp], name: str, shape: _Shape) -> str:
        """Add the shortcut and the ReLU of an operation."""
        if op.residual is not None:
            shortcut = self._maps[op.residual]
            if shortcut.shape != shape:
                raise ValueError(f'a shortcut of {shortcut.shape} cannot be added to a map of {shape}.')
            name = self.graph('Add', name, shortcut.name)
        return self.graph('Relu', name) if op.relu else name

    def _plain_conv(self, op: ConvOp, gate_in: Optional[_Gate], gate_out: Optional[_Gate], source: _Map) -> str:
        more_in, more_out = int(gate_in is not None), int(gate_out is not None)
        weight, bias = self._constants(
            F.pad(op.weight, (0, 0, 0, 0, 0, more_in, 0, more_out)), F.pad(op.bias, (0, more_out)))
        if gate_out is not None:
            weight, bias = (self.graph('Gather', tensor, gate_out.indices, axis=0) for tensor in (weight, bias))
        if gate_in is not None:
            weight = self.graph('Gather', weight, gate_in.indices, axis=1)
        return self._convolve(op, source.name, weight, bias)

    def _convolve(self, op: ConvOp, source: str, weight: str, bias: str) -> str:
        return self.graph(
            'Conv', source, weight, bias, kernel_shape=op.weight.shape[2:], strides=[op.stride] * 2,
            dilations=[op.dilation] * 2, pads=[op.padding] * 4, group=op.groups)

    def _grouped_conv(self, op: ConvOp, gate_in: Optional[_Gate], gate_out: Optional[_Gate], source: _Map) -> str:
        graph, name = self.graph, source.name
        if gate_in is not None:
            channels, height, width = source.shape
            zero = graph.constant([0])
            zeros = graph('Expand', graph.constant(torch.zeros(1, 1, 1)), graph.constant([channels + 1, height, width]))
            places = graph('Unsqueeze', gate_in.indices, graph.constant([1]))
            everything = graph('ScatterND', zeros, places, graph('Squeeze', name, zero))
            name = graph('Unsqueeze', graph('Slice', everything, zero, graph.constant([channels]), zero), zero)
        name = self._convolve(op, name, *self._constants(op.weight, op.bias))
        if gate_out is not None:
            padded = graph('Pad', name, graph.constant([0, 0, 0, 0, 0, 1, 0, 0]))
            name = graph('Gather', padded, gate_out.indices, axis=1)
        return name

    def _product(self, op: ConvOp, gate_in: _Gate, source: _Map, shape: _Shape) -> str:
        weight, bias = self._constants(F.pad(op.weight[:, :, 0, 0].T, (0, 0, 0, 1)), op.bias[:, None])
        weight = self.graph('Gather', weight, gate_in.indices, axis=0)
        pixels = self.graph('Reshape', source.name, self.graph.constant([-1, shape[1] * shape[2]]))
        name = self.graph('Gemm', weight, pixels, bias, transA=1)
        return self.graph('Reshape', name, self.graph.constant([1, *shape]))

    def _transposed_conv(self, op: ConvOp, gate_in: _Gate, source: _Map) -> str:
        weight, bias = self._constants(
            F.pad(op.weight.transpose(0, 1).flip(2, 3), (0, 0, 0, 0, 0, 0, 0, 1)), op.bias)
        return self.graph(
            'ConvTranspose', source.name, self.graph('Gather', weight, gate_in.indices, axis=0), bias,
            kernel_shape=op.weight.shape[2:], dilations=[op.dilation] * 2, pads=[_reach(op) - op.padding] * 4)

    def _pool(self, op: PoolOp, source: _Map, shape: _Shape) -> str:
        # Explicit padding instead of ceil_mode, whose definition differs between versions of ONNX
        ends = [max(0, (pooled - 1) * op.stride + op.kernel - side - op.padding)
                for pooled, side in zip(shape[1:], source.shape[1:], strict=True)]
        return self.graph(
            'AveragePool' if op.average else 'MaxPool', source.name, kernel_shape=[op.kernel] * 2,
            strides=[op.stride] * 2, pads=[op.padding, op.padding, *ends])

    def _blur(self, op: BlurOp, source: _Map, shape: _Shape) -> str:
        graph, height, width = self.graph, *source.shape[1:]
        # The number of channels is known at run time, so that each is an image of a batch.
        images = graph('Reshape', source.name, graph.constant([-1, 1, height, width]))
        padded = graph('Pad', images, graph.constant([0, 0, *[op.padding] * 2] * 2), mode='reflect')
        weight = torch.outer(binomial(op.kernel), binomial(op.kernel)).float()[None, None]
        name = graph('Conv', padded, graph.constant(weight), kernel_shape=weight.shape[2:], strides=[op.stride] * 2)
        return graph('Reshape', name, graph.constant([1, -1, *shape[1:]]))

    def _channel_conv(self, op: ChannelConvOp, source: _Map, shape: _Shape) -> str:
        line = self.graph('Reshape', source.name, self.graph.constant([1, 1, -1]))
        weight = op.weight.detach()[None, None]
        name = self.graph(
            'Conv', line, self.graph.constant(weight), kernel_shape=weight.shape[2:], pads=[len(op.weight) // 2] * 2)
        return self.graph('Reshape', name, self.graph.constant([1, *shape]))

    def _scale(self, op: ScaleOp, source: _Map, shape: _Shape) -> str:
        factors = self.graph('Sigmoid', self._maps[op.factors].name)
        return self._end(op, self.graph('Mul', source.name, factors), shape)

    def _adaptive_pool(self, op: AdaptivePoolOp, source: _Map, shape: _Shape) -> str:
        if op.bins == 1:
            return self.graph('GlobalAveragePool', source.name)
        # Products with matrices of means, for the rows and for the columns
        rows, columns = (F.adaptive_avg_pool1d(torch.eye(side), op.bins) for side in source.shape[1:])
        return self.graph('MatMul', self.graph('MatMul', self.graph.constant(rows.T), source.name),
                          self.graph.constant(columns))

    def _concat(self, op: ConcatOp, *arguments: Any) -> str:
        *sources, shape = arguments
        mode = 'align_corners' if op.align_corners else 'half_pixel'
        names = [
            source.name if source.shape[1:] == shape[1:] else self.graph(
                'Resize', source.name, '', '', self.graph.constant([1, source.shape[0], *shape[1:]]), mode='linear',
                coordinate_transformation_mode=mode)
            for source in sources]
        return self.graph('Concat', *names, axis=1)

    def _subsample(self, op: SubsampleOp, source: _Map, shape: _Shape) -> str:
        name = source.name
        if op.stride > 1:  # faster than a Slice with steps
            name = self.graph('MaxPool', name, kernel_shape=[1, 1], strides=[op.stride] * 2)
        if op.before or op.after:
            name = self.graph('Pad', name, self.graph.constant([0, op.before, 0, 0, 0, op.after, 0, 0]))
        return name


_WRITERS: Dict[type, Callable[..., str]] = {
    ConvOp: _Writer._conv, PoolOp: _Writer._pool, AdaptivePoolOp: _Writer._adaptive_pool, ConcatOp: _Writer._concat,
    SubsampleOp: _Writer._subsample, BlurOp: _Writer._blur, ChannelConvOp: _Writer._channel_conv,
    ScaleOp: _Writer._scale}


def _is_product(op: ConvOp) -> bool:
    """Whether a convolution is the product of a matrix with the map."""
    return op.weight.shape[2] == op.stride == 1 and op.padding == 0


def _is_transposed(op: ConvOp, shape: _Shape) -> bool:
    """Whether a convolution is written as a transposed one."""
    return (
        op.stride == 1 and op.padding <= _reach(op)
        and op.weight[0].numel() > _MOST_WEIGHTS * shape[1] * shape[2])


def _reach(op: ConvOp) -> int:
    return op.dilation * (op.weight.shape[2] - 1)
