"""Compiled training: the results of eager training, one graph per mode, and no recompilation by schedules"""
import copy
from typing import Any, Dict, List, Sequence

import pytest
import timm
import torch
import torch.nn as nn
from timm.task import ClassificationTask

import timm_gated  # noqa: F401

# All schedules of a training of gated ResNets.
SCHEDULE = dict(
    lam_epochs=(0, 3), gamma=0.5, gamma_epochs=(1, 3), noise_epochs=(0, 3), budget=0.4,
    prior_end={'type': 'beta', 'a': 0.2, 'b': 0.8}, prior_epochs=(0, 3))
OPTIONS: Dict[str, Dict[str, Any]] = {
    'gated_resnet20': SCHEDULE,
    'convnet_aig_resnet20': dict(),
    'fbs_resnet20': dict(density=0.5, density_epochs=(0, 3)),
    'gaternet_resnet20': dict(),
    'skipnet_resnet38': dict(stage='hybrid', layers=(2, 1)),  # the first block has no gate
}
TWO_STAGES: Dict[str, Any] = dict(layers=(1, 1), channels=(8, 8), num_classes=4)
ONE_STAGE: Dict[str, Any] = dict(layers=(1,), channels=(8,), num_classes=4)
# float64 reveals any difference of a graph. Users run inductor in float32, where rounding errors reach 5e-6 after all
# steps. Inductor compiles C++ for every kernel, so one stage has to do.
CASES = [
    *((name, 'aot_eager', torch.float64, TWO_STAGES) for name in OPTIONS),
    ('gated_resnet20', 'inductor', torch.float32, ONE_STAGE)]
TOLERANCE = {torch.float64: dict(rtol=1e-7, atol=1e-7), torch.float32: dict(rtol=1e-5, atol=5e-5)}


def train(task: ClassificationTask, model: nn.Module) -> List[torch.Tensor]:
    """Losses of all steps and outputs of all evaluations of four epochs. All compilation happens in the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    batches = torch.randn(12, 4, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype).unbind()
    numbers = []
    for epoch in range(4):
        with torch._dynamo.config.patch(error_on_recompile=epoch > 0):
            numbers += train_epoch(task, optimizer, batches[3 * epoch:3 * epoch + 3])
    return numbers


def train_epoch(task: ClassificationTask, optimizer: torch.optim.Optimizer, batches: Sequence) -> List[torch.Tensor]:
    """Train on all batches but the last, and evaluate on the last."""
    torch.manual_seed(0)
    *training, evaluation = batches
    numbers = []
    task.get_trainable_module().train()
    for batch in training:
        result = task(batch, torch.arange(4))
        optimizer.zero_grad()
        result['loss'].backward()
        optimizer.step()
        numbers.append(result['loss'].detach())
    task.get_trainable_module().eval()
    with torch.no_grad():
        numbers.append(task.get_trainable_module()(evaluation))
    return numbers


@pytest.mark.parametrize('name, backend, dtype, shape', CASES)
def test_compiled_training_is_the_eager_one(name, backend, dtype, shape):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = timm.create_model(name, **{**shape, **OPTIONS[name]}).to(dtype)
    copied = copy.deepcopy(model)
    eager, compiled = (ClassificationTask(m, nn.CrossEntropyLoss(), verbose=False) for m in (model, copied))
    compiled.trainable_module = torch.compile(copied, backend=backend, fullgraph=True)
    expected = train(eager, model)
    with torch._inductor.config.patch(fallback_random=True):  # the noise of the eager training
        found = train(compiled, copied)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.to(dtype), b.to(dtype), **TOLERANCE[dtype])  # the budget loss is always float64
    for (key, a), b in zip(copied.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE[dtype], msg=lambda message, key=key: f'{key}: {message}')
