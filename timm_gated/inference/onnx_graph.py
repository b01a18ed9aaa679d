"""Writer of ONNX graphs: nodes, constants and subgraphs under names that are unique in the file"""
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple, Union

import numpy as np
import torch

__all__ = ['GraphWriter', 'Shape', 'check_opset', 'save_model']

Shape = Sequence[Union[int, str]]  # a name stands for a dimension of any size

_MOST_BYTES_SHARED = 64  # of constants that are compared with earlier ones
_LEAST_OPSET = 13  # `Squeeze` and `Unsqueeze` take their axes as an input


def _import_onnx() -> Any:
    try:
        import onnx  # optional dependency
    except ImportError as error:
        raise ImportError('export_onnx(conditional=True) needs the package onnx: pip install onnx.') from error
    return onnx


def check_opset(opset: int) -> None:
    """Raise a `ValueError` for an opset version that the graphs cannot have."""
    newest = _import_onnx().defs.onnx_opset_version()
    if not _LEAST_OPSET <= opset <= newest:
        raise ValueError(f'opset must be between {_LEAST_OPSET} and {newest}, the newest of onnx, got {opset}.')


def save_model(model: Any, path: Path) -> None:
    """Write an ONNX model, with its weights, to one file."""
    _import_onnx().save(model, str(path))


class GraphWriter:
    """Nodes and constants of one graph. Calling the writer appends a node and returns the name of its output.

    Examples:
        >>> y = graph('Relu', graph('Add', x, graph.constant(bias)))
    """

    def __init__(self) -> None:
        self._onnx = _import_onnx()
        self._nodes: List[Any] = []
        self._constants: List[Any] = []
        self._shared: Dict[Tuple[str, Tuple[int, ...], bytes], str] = {}
        self._count = 0

    def __call__(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = self._new_name(operator)
        self._nodes.append(self._onnx.helper.make_node(operator, inputs, [output], output, **attributes))
        return output

    def constant(self, value: Any) -> str:
        """Return the name of a constant.

        Args:
            value: Tensor, or integers, which are stored as int64.
        """
        array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.array(value, dtype=np.int64)
        if array.nbytes > _MOST_BYTES_SHARED:
            return self._store(array)
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._shared:
            self._shared[key] = self._store(array)
        return self._shared[key]

    def choose(self, condition: str, then: Callable[[], str], otherwise: Callable[[], str], shape: Shape) -> str:
        """Append an `If` and return the name of its output.

        Args:
            condition: Name of a boolean.
            then: Function that appends the nodes that run if the condition holds, and returns the name of their result.
            otherwise: The same for the nodes that run if it does not hold.
            shape: Shape of both results.
        """
        return self(
            'If', condition, then_branch=self._branch(then, shape), else_branch=self._branch(otherwise, shape))

    def model_per_image(
            self,
            images: Tuple[str, Shape],
            image: str,
            outputs: Mapping[str, Tuple[str, Shape]],
            opset: int,
    ) -> Any:
        """Return a model that runs this graph for each image of a batch, by `Scan`.

        Args:
            images: Name and shape of the batch, the input of the model.
            image: Name of the image in this graph.
            outputs: Name and shape, without the batch, of the value in this graph, by name of the output of the model.
            opset: ONNX opset version.
        """
        helper = self._onnx.helper
        name, (batch, *shape) = images
        body = helper.make_graph(
            self._nodes, 'network', [self._declare(image, shape)],
            [self._declare(*value) for value in outputs.values()], self._constants)
        scan = helper.make_node('Scan', [name], list(outputs), 'images', body=body, num_scan_inputs=1)
        graph = helper.make_graph(
            [scan], 'batch', [self._declare(name, (batch, *shape))],
            [self._declare(output, (batch, *value[1])) for output, value in outputs.items()])
        opsets = [helper.make_opsetid('', opset)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets), producer_name='timm-gated')

    def _new_name(self, kind: str) -> str:
        self._count += 1
        return f'{kind}_{self._count}'

    def _store(self, array: np.ndarray) -> str:
        name = self._new_name('constant')
        # ascontiguousarray makes scalars one-dimensional
        values = np.ascontiguousarray(array).reshape(array.shape)
        self._constants.append(self._onnx.numpy_helper.from_array(values, name))
        return name

    def _branch(self, write: Callable[[], str], shape: Shape) -> Any:
        # With its own constants: ONNX Runtime packs the weights of convolutions only from the same graph
        around = self._nodes, self._constants, self._shared
        self._nodes, self._constants, self._shared = [], [], {}
        output = write()
        graph = self._onnx.helper.make_graph(
            self._nodes, self._new_name('branch'), [], [self._declare(output, shape)], self._constants)
        self._nodes, self._constants, self._shared = around
        return graph

    def _declare(self, name: str, shape: Shape) -> Any:
        return self._onnx.helper.make_tensor_value_info(name, self._onnx.TensorProto.FLOAT, shape)
