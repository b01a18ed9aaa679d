"""Where the time of an accelerated network goes, layer by layer"""
from dataclasses import dataclass
from typing import List, NamedTuple

__all__ = ['ExecutionPlan', 'PlannedLayer']


class PlannedLayer(NamedTuple):
    """One operation of an accelerated network.

    Attributes:
        name: Name of the layer in the original network, empty if it has none.
        operation: Description of the operation.
        algorithm: Algorithm of a convolution, empty for other operations.
        macs: MACs of the image that was run, by the convention of `count_macs`.
        milliseconds: Median time.
    """
    name: str
    operation: str
    algorithm: str
    macs: int
    milliseconds: float

    @property
    def gflops(self) -> float:
        """Effective GFLOP/s: two operations per MAC. Winograd's algorithm needs fewer, so it may exceed the peak."""
        return 2e-6 * self.macs / self.milliseconds if self.milliseconds else 0.


@dataclass(frozen=True)
class ExecutionPlan:
    """Layers of an accelerated network for one image; `print` shows them as a table.

    Attributes:
        layers: Operations in execution order.
        isa: Instruction set of the kernels.
        threads: Number of threads.
        input_size: Channels, height and width of the image.
    """
    layers: List[PlannedLayer]
    isa: str
    threads: int
    input_size: tuple

    @property
    def milliseconds(self) -> float:
        """Sum over the layers."""
        return sum(layer.milliseconds for layer in self.layers)

    @property
    def macs(self) -> int:
        """Sum over the layers."""
        return sum(layer.macs for layer in self.layers)

    def __str__(self) -> str:
        total = PlannedLayer('total', '', '', self.macs, self.milliseconds)
        rows = [('layer', 'operation', 'algorithm', 'MMACs', 'ms', 'GFLOP/s')] + [
            (layer.name, layer.operation, layer.algorithm, f'{layer.macs / 1e6:.2f}', f'{layer.milliseconds:.3f}',
             f'{layer.gflops:.1f}' if layer.macs else '') for layer in (*self.layers, total)]
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = [
            '  '.join([*(cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)),
                       *(cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True))]) for row in rows]
        size = ' x '.join(map(str, self.input_size))
        return '\n'.join((f'{size}, {self.isa}, {self.threads} thread(s)', *lines))
