"""Run trainings in separate processes and kill them"""
import random
import resource
import signal
import time
from typing import Any, Callable, List, NamedTuple, Optional

import torch
from forked import CONTEXT, start

# Limit of the reports of a training before it is killed, so that it cannot finish first on a fast machine.
REPORTS_WITHIN_DELAY = 2


class Kill(NamedTuple):
    """Time at which a training is killed.

    Attributes:
        steps: Number of reports of the training before the kill.
        delay: Seconds after the last report, for a kill by another process (SIGKILL).
        size: Size in bytes at which the next growing file is truncated, for a kill by the kernel (SIGXFSZ).
    """
    steps: int
    delay: float = 0.
    size: Optional[int] = None


class Life(NamedTuple):
    """Reports and exit code of a training: 0, or minus the signal that killed it."""
    reports: List[Any]
    exitcode: int


def random_kills(seed: int, number: int, max_steps: int, max_delay: float, sizes: range) -> List[Kill]:
    """Kills of alternating kinds: at a random time after a random step, and during the next write of a file."""
    rng = random.Random(seed)
    return [
        Kill(rng.randint(0, max_steps), size=rng.choice(sizes)) if index % 2 else
        Kill(rng.randint(0, max_steps), delay=rng.uniform(0, max_delay)) for index in range(number)]


def live(train: Callable, *args: Any, kill: Optional[Kill] = None) -> Life:
    """Run `train(report, *args)` in a separate process until it ends or is killed."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = start(_run, train, sender, kill, *args)
    sender.close()
    reports: List[Any] = []
    try:
        while True:
            if kill is not None and kill.size is None and len(reports) == kill.steps:
                time.sleep(kill.delay)
                process.kill()
            reports.append(receiver.recv())
    except EOFError:  # the process has ended
        process.join()
    finally:
        process.kill()
    assert process.exitcode is not None
    return Life(reports, process.exitcode)


def _run(train: Callable, sender: Any, kill: Optional[Kill], *args: Any) -> None:
    count = 0

    def arm() -> None:
        if kill is not None and kill.size is not None and count == kill.steps:
            _cut_files_at(kill.size)

    def report(entry: Any) -> None:
        nonlocal count
        sender.send(entry)
        count += 1
        arm()
        if kill is not None and kill.size is None and count >= kill.steps + REPORTS_WITHIN_DELAY:
            signal.pause()

    arm()
    train(report, *args)


def _cut_files_at(size: int) -> None:
    """Make the kernel kill this process when a file grows beyond this size, as if killed during a write."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would raise an error instead


def was_killed(life: Life) -> bool:
    return life.exitcode in (-signal.SIGKILL, -signal.SIGXFSZ)


def assert_equal(mine: Any, other: Any, where: str = '') -> None:
    """Assert bitwise equality."""
    if isinstance(other, dict):
        assert mine.keys() == other.keys(), where
        for key in other:
            assert_equal(mine[key], other[key], f'{where}.{key}')
    elif isinstance(other, (list, tuple)):
        assert len(mine) == len(other), where
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert_equal(a, b, f'{where}.{index}')
    elif isinstance(other, torch.Tensor):
        assert torch.equal(mine, other), where
    else:
        assert mine == other, where
