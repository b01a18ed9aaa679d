"""Accelerated networks under load: many inferences, a large image, out of memory"""
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import timm
import torch
from accelerated import check, images, is_decided
from effort import TIMES
from forked import CONTEXT, run_script
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS
from mmseg_small import BASE
from nets import shuffle
from paths import ROOT

from timm_gated import accelerate, gates

GIGABYTE = 2 ** 30
COUNT = 2000 * TIMES


def memory(key: str) -> int:
    """Memory of this process in bytes: VmSize (virtual), VmRSS (resident) or VmHWM (peak resident)."""
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{key}:'))


def test_thousands_of_inferences(tmp_path):
    """In a new process, where memory freed earlier cannot hide growth."""
    tool = ROOT / 'tools' / 'dev' / 'soak_inference.py'
    done = run_script(tool, '--backend', 'native', '--count', COUNT, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert f'{COUNT} inferences: 0 outputs changed' in done.output


def reset_peak() -> None:
    Path('/proc/self/clear_refs').write_text('5')


@torch.no_grad()
def run_large_image() -> Dict[str, Any]:
    """Compare the last map of the masked and the accelerated network for an image of 1,000 x 500 pixels."""
    config = Config.fromfile(BASE).model.backbone
    assert config.depth == 50 and config.dilations[-1] == 4
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = shuffle(MODELS.build(config))
    model.eval()
    x = images(1, 500, 1000)
    peaks, before = {}, memory('VmRSS')
    reset_peak()
    expected = model(x)[-1]
    peaks['masked'] = memory('VmHWM') - before
    assert is_decided(model)
    shares = [float(gate.decision.mean()) for _, gate in gates(model)]

    fast = accelerate(model, 'native')
    reset_peak()
    actual = fast(x)[-1]
    peaks['accelerated'] = memory('VmHWM') - before
    shape, scale = tuple(actual.shape), max(map(abs, expected.aminmax()))
    difference = float(actual.sub_(expected).abs_().max() / scale)
    return dict(peaks=peaks, open=sum(shares) / len(shares), shape=shape, difference=difference)


def in_own_process(function: Callable[[], Any]) -> Any:
    """Run a function in a new process, without memory that other tests have left."""
    with ProcessPoolExecutor(1, CONTEXT) as pool:
        return pool.submit(function).result()


def test_large_image_through_the_backbone_of_pspnet():
    result = in_own_process(run_large_image)
    print({name: f'{peak / GIGABYTE:.2f} GB' for name, peak in result['peaks'].items()})
    assert result['shape'] == (1, 2048, 63, 125) and 0.2 < result['open'] < 0.8
    assert result['difference'] <= 1e-4
    assert max(result['peaks'].values()) < 0.8 * GIGABYTE


def run_many_sizes() -> int:
    """Return by how much 36 more image sizes make the process grow after 4, which need about as much each."""
    torch.manual_seed(0)
    fast = accelerate(shuffle(timm.create_model('gated_resnet20')).eval(), 'native')
    for width in range(320, 324):
        fast(images(1, 320, width))
    before = memory('VmRSS')
    assert before > 0
    for width in range(324, 360):
        fast(images(1, 320, width))
    return memory('VmRSS') - before


def test_memory_is_kept_for_the_last_sizes_only():
    assert in_own_process(run_many_sizes) < GIGABYTE / 20  # 1.8 GB if the memory of all sizes is kept


def run_out_of_memory() -> str:
    """Return the message of the error, as exceptions of pytest cannot be pickled."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet18')).eval()
    large, small = images(1, 1024, 1024), images(1, 64, 64)
    expected = accelerate(model, 'native')(small)
    fast = accelerate(model, 'native')
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory('VmSize') + GIGABYTE // 16, limits[1]))
    message = ''
    try:
        fast(large)
    except MemoryError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert torch.equal(fast(small), expected)
    check(model, large, 'native')
    return message


def test_out_of_memory_leaves_the_network_usable():
    assert 'out of memory' in in_own_process(run_out_of_memory)
