"""Load mutated files in a process that may only read, with limited memory and time. Used by tests/hub/test_hostile.py

Loads one mutation after the other in the working directory and writes the outcomes to a report.

    python tests/helpers/hostile_worker.py KIND COUNT REPORT
"""
import argparse
import importlib.util
import json
import logging
import os
import resource
import signal
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List

import timm
import torch
import torch.nn as nn
from mutations import MARKER, mutate
from timm.task import ClassificationTask, resume_task_checkpoint

import timm_gated
from timm_gated.analysis import sources

MEMORY = 2 << 30  # bytes that loading may allocate
HANG = {signal.ITIMER_PROF: 20, signal.ITIMER_REAL: 600}  # seconds of CPU time and wall time per mutation
FILES = {'config': 'config.json', 'safetensors': 'model.safetensors', 'pickle': 'weights.pth'}
NET = dict(layers=(1, 1, 1), channels=(4, 8, 8))


# Audit events that loading a file must not cause


EVENTS = (
    'ctypes.', 'ftplib.', 'http.', 'os.chmod', 'os.exec', 'os.fork', 'os.link', 'os.mkdir', 'os.posix_spawn',
    'os.remove', 'os.rename', 'os.rmdir', 'os.symlink', 'os.system', 'os.truncate', 'pickle.find_class', 'shutil.',
    'smtplib.', 'socket.', 'subprocess.', 'urllib.', 'webbrowser.')
CODE = tuple({
    sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), str(Path(timm_gated.__file__).parents[1])})

forbidden: List[str] = []
watching = False


def watch(event: str, args: Any) -> None:
    """Audit hook that records and prevents forbidden events."""
    if watching and (
            event.startswith(EVENTS) or event == 'open' and not may_open(args[0], args[2])
            or event == 'exec' and not args[0].co_filename.startswith((*CODE, '<frozen'))):
        forbidden.append(f'{event} {str(args)[:200]}')
        raise PermissionError(forbidden[-1])


def may_open(path: Any, flags: int) -> bool:
    """Only code and the model's folder may be read, and nothing may be written."""
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return False
    return isinstance(path, int) or os.path.abspath(os.fsdecode(path)).startswith((*CODE, os.getcwd()))


# Ways to load a file


def by_timm() -> nn.Module:
    return timm.create_model('local-dir:.', pretrained=True)


def by_tools() -> nn.Module:
    """Like `checkpoint_path` of timm."""
    args = argparse.Namespace(
        num_classes=None, in_chans=None, pretrained=False, model_kwargs=NET, use_ema=True, device='cpu')
    return sources.create_network('gated_resnet20', FILES['pickle'], args)


def by_check() -> nn.Module:
    return timm_gated.check_pretrained('.')


def by_resume() -> nn.Module:
    task: Any = ClassificationTask(timm.create_model('gated_resnet20', **NET), nn.CrossEntropyLoss(), verbose=False)
    resume_task_checkpoint(task, FILES['pickle'])
    return task.get_trainable_module()


def by_mmengine() -> nn.Module:
    from mmengine.runner import load_checkpoint
    model = timm.create_model('gated_resnet20', **NET)
    file, = (name for kind, name in FILES.items() if kind != 'config' and os.path.exists(name))
    load_checkpoint(model, file, strict=True)
    return model


WAYS: Dict[str, List[Callable[[], nn.Module]]] = {
    'config': [by_check, by_timm], 'safetensors': [by_check, by_timm], 'pickle': [by_timm, by_tools, by_resume]}
if importlib.util.find_spec('mmengine'):
    import mmseg_plugin  # noqa: F401
    WAYS['safetensors'].append(by_mmengine)
    WAYS['pickle'].append(by_mmengine)


def judge(model: nn.Module, shapes: Dict[str, torch.Size], kind: str, load: Callable) -> str:
    """A model is well-formed if it has the shapes of the original and runs.

    A mutated config may describe another model, which need not run. If `check_pretrained` accepts it, its shapes must
    be those of the weights.
    """
    if kind == 'config' and load is by_timm:
        return 'well-formed'
    found = {key: value.shape for key, value in model.state_dict().items()}
    channels = found['conv1.weight'][1]  # timm adapts the stem to any number of channels
    if found != {**shapes, 'conv1.weight': torch.Size([4, channels, 3, 3])}:
        return f'of other shapes: {found}'
    if kind == 'config':
        return 'well-formed'
    logits = model.eval()(torch.zeros(1, channels, 32, 32))
    return 'well-formed' if logits.shape == (1, 10) else f'logits of shape {logits.shape}'


def limit_time(limits: Dict[int, int]) -> None:
    """Let the kernel end the process when a time limit is exceeded."""
    for timer, seconds in limits.items():
        signal.setitimer(timer, seconds)


def main(kind: str, count: int, report: Path) -> None:
    """Write two lines per mutation and way: the mutation before loading, and the outcome."""
    global watching
    file = Path(FILES[kind])
    good = file.read_bytes()
    for load in WAYS[kind]:
        shapes = {key: value.shape for key, value in load().state_dict().items()}
    used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with report.open('w') as out:
        for index in range(count):
            how, content = mutate(kind, index, good)
            file.write_bytes(content)
            for load in WAYS[kind]:
                print(json.dumps([index, how, load.__name__]), file=out, flush=True)
                model = None
                limit_time(HANG)
                watching = True
                try:
                    model = load()
                except Exception as error:
                    outcome = f'{type(error).__name__}: {error}'
                watching = False
                limit_time(dict.fromkeys(HANG, 0))
                if model is not None:
                    outcome = judge(model, shapes, kind, load)
                if forbidden or Path(MARKER).exists():
                    outcome = f'FORBIDDEN {forbidden}'
                    forbidden.clear()
                print(json.dumps(outcome), file=out, flush=True)


if __name__ == '__main__':
    sys.addaudithook(watch)
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    logging.disable()
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
