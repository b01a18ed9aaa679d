"""Trainings in processes of their own that are killed"""
import random
import resource
import signal
import time
from typing import Any, Callable, List, NamedTuple, Optional

import torch
from forked import CONTEXT, start

# A training that is to be killed from outside goes on for no more reports than these: however fast a machine is, it
# does not get to its end before.
REPORTS_WITHIN_DELAY = 2


class Kill(NamedTuple):
    """When to kill a training.

    Attributes:
        steps: Reports of the training after which it is due.
        delay: Seconds until then, for one from outside (SIGKILL).
        size: Bytes after which the next file to grow so large is cut, if the kernel is to do it (SIGXFSZ).
    """
    steps: int
    delay: float = 0.
    size: Optional[int] = None


class Life(NamedTuple):
    """What a training reported until its end, and how it ended: 0, or minus the signal that killed it."""
    reports: List[Any]
    exitcode: int


def random_kills(seed: int, number: int, max_steps: int, max_delay: float, sizes: range) -> List[Kill]:
    """Kills of both kinds in turns: at a random time after a random step, and within the first file written then."""
    rng = random.Random(seed)
    return [
        Kill(rng.randint(0, max_steps), size=rng.choice(sizes)) if index % 2 else
        Kill(rng.randint(0, max_steps), delay=rng.uniform(0, max_delay)) for index in range(number)]


def live(train: Callable, *args: Any, kill: Optional[Kill] = None) -> Life:
    """Run `train(report, *args)` in a process of its own, until it ends or is killed."""
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
    except EOFError:  # it is over
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
    """Have the kernel end this process where a file would grow beyond this size, like a kill within a write."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would go on with an error


def was_killed(life: Life) -> bool:
    return life.exitcode in (-signal.SIGKILL, -signal.SIGXFSZ)


def assert_equal(mine: Any, other: Any, where: str = '') -> None:
    """To the last bit."""
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
