"""Print the changes that importing our packages makes to others, as a JSON list

Compares the attributes of all loaded modules of the packages in OTHERS, of their classes and of their registries before
and after, including the entries of dicts, lists and sets. Values are compared by identity.
"""
import importlib.machinery
import json
import sys
import types
from typing import Any, Dict, Iterator, List, Sequence, Tuple

OTHERS = ('timm', 'mmengine', 'mmcv', 'mmseg', 'torch', 'torchvision', 'safetensors', 'copyreg', 'builtins')
OURS = ('timm_gated', 'mmseg_plugin')
CONTAINERS = (dict, list, set)


class Operators(types.ModuleType):
    """Stand-in for the operators of a full mmcv, so that mmseg can be imported before our packages."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return print


def package(thing: Any) -> str:
    return str(getattr(thing, '__module__', '')).partition('.')[0]


def owners() -> Iterator[Tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name.partition('.')[0] in OTHERS and isinstance(module, types.ModuleType):
            yield name, module
            for key, value in list(vars(module).items()):
                registry = package(type(value)) in ('timm', 'mmengine', 'mmcv', 'mmseg') and hasattr(value, '__dict__')
                if registry or (isinstance(value, type) and value.__module__ == name):
                    yield f'{name}.{key}', value


def snapshot() -> Dict[Tuple[str, str], Any]:
    """Values by owner and name. Containers are compared by their entries, not by identity."""
    found: Dict[Tuple[str, str], Any] = {}
    for owner, thing in owners():
        for key, value in list(vars(thing).items()):
            if key == '__slotnames__':  # a cache of copyreg, which copies of configs fill
                continue
            if not isinstance(value, CONTAINERS):
                found[owner, key] = value
                continue
            found[owner, key] = type(value)
            if not key.startswith('__'):
                items = value.items() if isinstance(value, dict) else ((id(entry), entry) for entry in value)
                found.update({(owner, f'{key}[{index!r}]'): entry for index, entry in list(items)})
    return found


def places() -> Dict[Tuple[str, str], Any]:
    """Who loads a checkpoint, and who reads a file, for paths that are not ours."""
    from mmengine.fileio import get_file_backend
    from mmengine.runner import CheckpointLoader
    paths = ('x', 'x.pth', 'a/x.safetensors', '~/x.pt', 's3://x.safetensors', 'https://x/x.pth', 'open-mmlab://x')
    found = {('loader', path): CheckpointLoader._get_checkpoint_loader(path) for path in paths}
    found.update({('backend', path): type(get_file_backend(path)) for path in paths[:4]})
    return found


def our_names() -> List[str]:
    from timm_gated.models._registry import entry_points
    return ['timm_gated', 'timm-gated', 'mmseg_plugin', *entry_points()]


def is_ours(owner: str, key: str, value: Any, names: Sequence[str]) -> bool:
    """Whether an addition is an entry of a registry or module under one of our names.

    Additions to the classes that torch considers safe to load do not count.
    """
    if owner == 'torch._weights_only_unpickler' or ('[' not in key and owner not in sys.modules):
        return False
    text = f'{key} {value!r}'
    return package(value) in OURS or any(name in text for name in names)


def main() -> None:
    operators = Operators('mmcv._ext')
    operators.__spec__ = importlib.machinery.ModuleSpec('mmcv._ext', loader=None)
    sys.modules['mmcv._ext'] = operators
    for name in (
            'timm.task', 'timm.data', 'timm.optim', 'mmengine.runner', 'mmengine.evaluator', 'mmseg.apis',
            'mmseg.datasets', 'mmseg.engine', 'mmseg.models', 'torch._dynamo', 'torch.export', 'torch.onnx'):
        importlib.import_module(name)
    before = {**snapshot(), **places()}
    for name in ('timm_gated', 'timm_gated.analysis', 'mmseg_plugin', 'mmseg_plugin.analysis', 'mmseg_plugin.pruning'):
        importlib.import_module(name)
    after = {**snapshot(), **places()}
    known = {owner for owner, _ in before}
    names, changed = our_names(), []
    for owner, key in sorted(before.keys() | after.keys()):
        value, name = after.get((owner, key)), f'{owner}.{key}'
        if (owner, key) not in after:
            changed.append(f'removed: {name}')
        elif (owner, key) in before:
            if value is not before[owner, key]:
                changed.append(f'changed: {name}')
        elif owner in known and not isinstance(value, types.ModuleType) and not is_ours(owner, key, value, names):
            changed.append(f'added: {name} = {value!r:.100}')
    print(json.dumps(changed))


if __name__ == '__main__':
    main()
