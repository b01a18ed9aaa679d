"""Threads of the native backend: batches of any size, calls from several threads, and forks"""
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from nets import shuffle

from timm_gated import accelerate


@pytest.fixture
def fast():
    torch.manual_seed(0)
    return accelerate(shuffle(timm.create_model('gated_resnet20')).eval(), 'native')


@pytest.fixture(autouse=True)
def restore_threads():
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize('threads', [1, 2, 3, 5])
@pytest.mark.parametrize('count', [1, 2, 3, 7])
def test_outputs_do_not_depend_on_the_number_of_threads(fast, threads, count):
    images = torch.randn(count, 3, 33, 31)
    expected = fast(images)
    torch.set_num_threads(threads)
    for _ in range(3):
        torch.testing.assert_close(fast(images), expected, atol=1e-6, rtol=1e-5)


def test_calls_at_the_same_time(fast):
    batches = [torch.randn(1 + i % 3, 3, 24 + i % 2, 24) for i in range(24)]
    expected = [fast(batch) for batch in batches]
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        for actual, wanted in zip(pool.map(fast, batches * 3), expected * 3, strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-5)


FORK = """
import os, sys, timm, torch, timm_gated
torch.set_num_threads(2)
fast = timm_gated.accelerate(timm.create_model('gated_resnet20').eval(), 'native')
images = torch.randn(1, 3, 32, 32)
expected = fast.forward_features(images)
child = os.fork()
equal = torch.equal(fast.forward_features(images), expected)
if not child:
    os._exit(0 if equal else 3)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) or not equal)
"""


def test_a_forked_process_has_its_own_threads():
    """A fork does not take the workers along."""
    assert subprocess.run([sys.executable, '-c', FORK], timeout=120).returncode == 0
