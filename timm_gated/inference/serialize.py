"""Accelerated networks as files: a program and its weights in one safetensors file

The weights are float32, folded and not packed: they are packed for the instruction set of the machine that loads them.
A file holds no code and no pickle. Its content is checked like any other `Program`.

Format, version 2. Integers are int64, weights float32, and -1 stands for none. Tensors:

    network      [6]: version of the format; channels of the image; number of maps; number of gates; number of
                 operations at the end that are the classifier, 0 without one; form of the output, an index of FORMS
    operations   [operations, 23]: one row per operation, in execution order. COLUMNS lists the columns: the index in
                 KINDS, then the attributes of the operation. Columns that its class does not have are -1.
    text         [bytes], uint8: JSON with the layer `names` of all operations, and the `keys` of the outputs if they
                 form a dict
    N.weight, …  tensors of operation N (from 0): `weight` and `bias` of a convolution, [out, in, kernel, kernel] and
                 [out]; `weight1`, `bias1`, `weight2` and `bias2` of a gate, [hidden, in], [hidden], [out, hidden] and
                 [out]; `sources` of a concatenation, the numbers of its maps, int64; `scale` of a quantisation, [1];
                 `weight` of a convolution over channels, [kernel];
                 `weight`, int8, `bias`, int32, `multiplier`, `ratio` (with a shortcut) and `scale` of an int8
                 convolution; `weight`, int8, `bias`, `multiplier` and `scale` of an int8 linear layer

These are sufficient to run the program. A network with a classifier has two outputs: the features and, after average
pooling and a 1 x 1 convolution (absent without classes), the logits; its form is 'map'.

Files of version 1 can be read: they have the first 20 columns, and convolutions without groups.

`__metadata__` has one entry, `timm_gated`: the CRC-32 of all tensors, sorted by name, as eight hexadecimal digits. Of
each tensor, it covers the name in UTF-8, the shape as int64, and the values.
"""
import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Type, Union

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..utils import explained, new_file
from .program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConcatOp,
    ConvOp,
    DequantizeOp,
    GateOp,
    Int8ConvOp,
    Int8LinearOp,
    Op,
    OutputOp,
    PoolOp,
    Program,
    QuantizeOp,
    ScaleOp,
    SkipOp,
    SubsampleOp,
)
from .trunks import as_dict, first_map

__all__ = ['Network', 'checksum', 'decode', 'encode', 'load_network', 'save_network']

VERSION = 2
_OLD_COLUMNS = 20  # of version 1
KINDS: Tuple[Type[Any], ...] = (
    ConvOp, GateOp, PoolOp, AdaptivePoolOp, ConcatOp, SubsampleOp, SkipOp, OutputOp, QuantizeOp, DequantizeOp,
    Int8ConvOp, Int8LinearOp, BlurOp, ChannelConvOp, ScaleOp)
COLUMNS = (
    'kind', 'source', 'target', 'residual', 'gate', 'gate_in', 'gate_out', 'kernel', 'stride', 'dilation', 'padding',
    'relu', 'average', 'ceil_mode', 'bins', 'align_corners', 'before', 'after', 'count', 'macs',
    'zero', 'groups', 'factors')
FORMS = ('list', 'tuple', 'map', 'dict')  # of the output maps; 'map': the first one alone

_METADATA = 'timm_gated'
_TYPES = {  # of tensors that are not float32
    (Int8ConvOp, 'weight'): torch.int8, (Int8ConvOp, 'bias'): torch.int32, (Int8LinearOp, 'weight'): torch.int8}


@dataclass(frozen=True)
class Network:
    """What an accelerated network is made of.

    Attributes:
        program: Operations of the network.
        assemble: Function from the list of returned maps, without that of the classifier, to the features.
        classifier: Number of operations at the end that are the classifier, 0 without one.

    Raises:
        ValueError: If the program does not end with such a classifier, or the features are not a single map.
    """
    program: Program
    assemble: Callable[[List[torch.Tensor]], Any] = list
    classifier: int = 0

    def __post_init__(self) -> None:
        if self.classifier and not _is_classifier(self.program.ops, self.classifier):
            raise ValueError(f'the last {self.classifier} operations are not a classifier.')
        if self.classifier and self.assemble is not first_map:
            raise ValueError('a classifier needs features that are a single map.')


def _is_classifier(ops: Sequence[Op], count: int) -> bool:
    if count not in (2, 3) or len(ops) <= count:
        return False
    features, pool, *linear, output = ops[-count - 1:]
    if not isinstance(features, OutputOp) or not isinstance(pool, AdaptivePoolOp) or not isinstance(output, OutputOp):
        return False
    target = pool.target
    for op in linear:
        if not isinstance(op, ConvOp) or not _is_linear(op) or op.source != target:
            return False
        target = op.target
    num_outputs = sum(isinstance(op, OutputOp) for op in ops)
    return (pool.source, pool.bins, output.source, num_outputs) == (features.source, 1, target, 2)


def _is_linear(op: ConvOp) -> bool:
    options = op.weight.shape[2], op.stride, op.padding, op.relu, op.residual, op.gate_in, op.gate_out, op.groups
    return options == (1, 1, 0, False, None, None, None, 1)


def encode(network: Network) -> Dict[str, torch.Tensor]:
    """Return the tensors of a file.

    Args:
        network: Network to encode.
    """
    program = network.program
    form, keys = _form(network.assemble)
    tensors: Dict[str, torch.Tensor] = {}
    rows = []
    for index, op in enumerate(program.ops):
        row = dict.fromkeys(COLUMNS, -1)
        row['kind'] = KINDS.index(type(op))
        for name, value in vars(op).items():
            if isinstance(value, torch.Tensor):
                if value.numel():
                    dtype = torch.float32 if value.is_floating_point() else value.dtype
                    tensors[f'{index}.{name}'] = value.detach().to('cpu', dtype)
            elif isinstance(value, tuple):
                tensors[f'{index}.{name}'] = torch.tensor(value, dtype=torch.int64)
            elif value is not None and name != 'name':
                row[name] = int(value)
        rows.append([row[column] for column in COLUMNS])
    tensors['operations'] = torch.tensor(rows, dtype=torch.int64).view(-1, len(COLUMNS))
    tensors['network'] = torch.tensor([
        VERSION, program.in_channels, program.num_maps, program.num_gates, network.classifier, FORMS.index(form)])
    text = {'names': [getattr(op, 'name', '') for op in program.ops], **({} if keys is None else {'keys': keys})}
    tensors['text'] = torch.from_numpy(np.frombuffer(json.dumps(text).encode(), np.uint8).copy())
    return tensors


def _form(assemble: Callable) -> Tuple[str, Optional[list]]:
    """Form of the output, and the keys of a dict."""
    if isinstance(assemble, partial) and assemble.func is as_dict:
        keys = list(assemble.args[0])
        if all(type(key) in (str, int) for key in keys):
            return 'dict', keys
    for form, function in (('list', list), ('tuple', tuple), ('map', first_map)):
        if assemble is function:
            return form, None
    raise ValueError(f'the output of the network cannot be saved: {assemble!r} is not one of {", ".join(FORMS)}.')


def decode(tensors: Mapping[str, torch.Tensor]) -> Network:
    """Return the network that `encode` turned into tensors; raise a ValueError if they are not one.

    Args:
        tensors: Tensors by name.
    """
    reader = _Reader(tensors)
    header = reader.integers('network')
    if header[:1] not in ([1], [VERSION]):
        raise ValueError(f'the version of the format must be 1 or {VERSION}, got {header[:1]}.')
    if len(header) != 6:
        raise ValueError(f'network must have 6 values, got {len(header)}.')
    _, in_channels, num_maps, num_gates, classifier, form = header
    num_columns = _OLD_COLUMNS if header[0] == 1 else len(COLUMNS)
    flat = reader.integers('operations', num_columns)
    rows = [flat[start:start + num_columns] for start in range(0, len(flat), num_columns)]
    if num_columns == _OLD_COLUMNS:
        rows = [_upgraded(row) for row in rows]
    names, keys = _texts(reader.tensor('text', torch.uint8), len(rows))
    ops = [reader.operation(index, row, name) for index, (row, name) in enumerate(zip(rows, names, strict=True))]
    reader.check_all_read()
    program = Program(in_channels, ops, num_maps, num_gates)
    num_outputs = sum(isinstance(op, OutputOp) for op in ops) - (classifier > 0)
    return Network(program, _assemble(form, keys, num_outputs), classifier)


def _upgraded(row: List[int]) -> List[int]:
    """A row of version 1 with all columns."""
    upgraded = {**dict.fromkeys(COLUMNS, -1), **dict(zip(COLUMNS, row, strict=False))}
    if upgraded['kind'] == KINDS.index(ConvOp):
        upgraded['groups'] = 1
    return list(upgraded.values())


def _texts(text: torch.Tensor, num_operations: int) -> Tuple[List[str], Optional[list]]:
    """Names of layers, and keys of the outputs."""
    try:
        content = json.loads(text.numpy().tobytes())
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f'the names of its layers are not JSON: {error}.') from error
    names, keys = (content.get(name) if isinstance(content, dict) else None for name in ('names', 'keys'))
    if not isinstance(names, list) or len(names) != num_operations or not all(isinstance(name, str) for name in names):
        raise ValueError(f'there must be one name per operation, {num_operations} in all.')
    if keys is not None and (not isinstance(keys, list) or not all(type(key) in (str, int) for key in keys)):
        raise ValueError('the keys of the outputs must be a list of strings or integers.')
    return names, keys


def _assemble(form: int, keys: Optional[list], num_outputs: int) -> Callable[[List[torch.Tensor]], Any]:
    if not 0 <= form < len(FORMS):
        raise ValueError(f'the form of the output must be between 0 and {len(FORMS) - 1}, got {form}.')
    if FORMS[form] == 'dict':
        if keys is None or len(set(keys)) != num_outputs or len(keys) != num_outputs:
            raise ValueError(f'the keys of {num_outputs} outputs must be as many different ones.')
        return partial(as_dict, keys)
    if keys is not None:
        raise ValueError(f'only a dict of outputs has keys, not a {FORMS[form]}.')
    if FORMS[form] == 'map' and num_outputs < 1:
        raise ValueError('there is no output.')
    functions: Dict[str, Any] = {'list': list, 'tuple': tuple, 'map': first_map}
    return functions[FORMS[form]]


class _Reader:
    """Checks the types of tensors and keeps track of those that were read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._read: set = set()

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f'{name} is missing.')
        tensor = self._tensors[name]
        if tensor.dtype != dtype:
            raise ValueError(f'{name} must be {dtype}, got {tensor.dtype}.')
        self._read.add(name)
        return tensor

    def integers(self, name: str, columns: Optional[int] = None) -> List[int]:
        """Values of a vector, or of all rows of a matrix."""
        tensor = self.tensor(name, torch.int64)
        if tensor.ndim != (1 if columns is None else 2) or (columns is not None and tensor.shape[1] != columns):
            shape = '[values]' if columns is None else f'[rows, {columns}]'
            raise ValueError(f'{name} must have the shape {shape}, got {tuple(tensor.shape)}.')
        return tensor.flatten().tolist()

    def operation(self, index: int, row: List[int], name: str) -> Op:
        values = dict(zip(COLUMNS, row, strict=True))
        kind = values.pop('kind')
        if not 0 <= kind < len(KINDS):
            raise ValueError(f'operation {index}: kind must be between 0 and {len(KINDS) - 1}, got {kind}.')
        cls = KINDS[kind]
        arguments: Dict[str, Any] = {}
        for field in fields(cls):
            if field.type is torch.Tensor:
                if field.name != 'ratio' or arguments['residual'] is not None:
                    dtype = _TYPES.get((cls, field.name), torch.float32)
                    arguments[field.name] = self.tensor(f'{index}.{field.name}', dtype)
            elif field.name == 'sources':
                arguments[field.name] = tuple(self.integers(f'{index}.sources'))
            elif field.name == 'name':
                arguments[field.name] = name
            else:
                arguments[field.name] = _value(field.type, values.pop(field.name), f'{index}, {cls.__name__}')
        if set(values.values()) - {-1}:
            others = {column: value for column, value in values.items() if value != -1}
            raise ValueError(f'operation {index}, {cls.__name__}: columns that it does not have must be -1: {others}.')
        return cls(**arguments)

    def check_all_read(self) -> None:
        others = sorted(set(self._tensors) - self._read)
        if others:
            raise ValueError(f'{others[0][:80]!r} is not part of the network ({len(others)} tensors in all).')


def _value(kind: Any, value: int, where: str) -> Any:
    if kind is bool:
        if value not in (0, 1):
            raise ValueError(f'operation {where}: options must be 0 or 1, got {value}.')
        return bool(value)
    return None if kind is not int and value == -1 else value


def save_network(network: Network, path: Union[str, Path]) -> None:
    """Save a network as a file. The file is written completely or not at all.

    Args:
        network: Network to save.
        path: Path of the file.
    """
    # safetensors rejects tensors that share memory.
    tensors = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in encode(network).items()}
    with new_file(path) as unfinished:
        save_file(tensors, unfinished, {_METADATA: checksum(tensors)})


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the CRC-32 of contiguous tensors, as in the metadata of a file.

    Args:
        tensors: Tensors by name.
    """
    crc = 0
    for name in sorted(tensors):
        values: Any = tensors[name].numpy()
        for part in (name.encode(), np.array(values.shape, np.int64).tobytes(), values):
            crc = zlib.crc32(part, crc)
    return f'{crc:08x}'


def load_network(path: Union[str, Path]) -> Network:
    """Load a network from a file; raise a ValueError that names the file if it is damaged or not of this format.

    Args:
        path: Path of the file.
    """
    with open(path, 'rb'):  # errors of the operating system
        pass
    with _named(path), safe_open(path, 'pt') as file:  # checks the sizes of all tensors against that of the file
        expected = (file.metadata() or {}).get(_METADATA)
        if expected is None:
            raise ValueError('it was not saved by `save` of an accelerated network.')
        # The tensors are mapped. Those of a network are copied once it is valid, so that the file can be replaced.
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
        actual = checksum(tensors)
        if actual != expected:
            raise ValueError(f'it is damaged: the checksum is {actual}, not {expected[:80]!r}.')
        network = decode(tensors)
        for op in network.program.ops:
            for name, value in vars(op).items():
                if isinstance(value, torch.Tensor):
                    setattr(op, name, value.clone())
    return network


@contextmanager
def _named(path: Union[str, Path]) -> Iterator[None]:
    """Turn errors about the content of a file into a ValueError that begins with its name."""
    problem = f'{path} does not hold an accelerated network'
    try:
        with explained(problem):
            yield
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(problem) else f'{problem}: {error}') from error
