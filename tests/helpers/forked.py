"""Fresh processes that start fast: forked from a server that has imported the slow packages"""
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import torch

CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(['timm_gated', 'mmseg_plugin', 'mmseg.apis'])


class Done(NamedTuple):
    """Exit code of a script and its output, stdout and stderr."""
    returncode: int
    output: str


def start(function: Callable, *args: Any) -> Any:
    process = CONTEXT.Process(target=function, args=args)
    process.start()
    return process


def run_script(path: Path, *args: Any, cwd: Path, processes: int = 1) -> Done:
    """Run a script in a folder, as Python does, or with several processes as torchrun does."""
    envs: List[Dict[str, Any]] = [{}]
    if processes > 1:
        common = dict(MASTER_ADDR='127.0.0.1', MASTER_PORT=free_port(), WORLD_SIZE=processes)
        envs = [dict(common, RANK=rank, LOCAL_RANK=rank) for rank in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(processes)]
        started = [
            start(_run, str(path), [str(arg) for arg in args], str(cwd), str(output), env)
            for output, env in zip(outputs, envs, strict=True)]
        while any(process.exitcode is None for process in started):
            ended = wait([process.sentinel for process in started if process.exitcode is None], timeout=600)
            if not ended or any(process.exitcode for process in started):  # the others would wait for the failed one
                for process in started:
                    process.kill()
        return Done(
            max(abs(process.exitcode) for process in started), '\n'.join(output.read_text() for output in outputs))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def _run(path: str, args: list, cwd: str, output: str, env: Dict[str, Any]) -> None:
    os.chdir(cwd)
    os.environ.update({key: str(value) for key, value in env.items()})
    with open(output, 'wb') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    leave_configs_as_they_are()
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name='__main__')


def leave_configs_as_they_are() -> None:
    """Disable the formatting of configs: mmengine does it per checkpoint, and it dominates a small training."""
    if 'mmengine.config.config' in sys.modules:
        sys.modules['mmengine.config.config'].FormatCode = lambda code, **kwargs: (code, False)  # type: ignore
