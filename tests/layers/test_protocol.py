"""The interface of gates and objectives, with a gate and an objective defined here"""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from nets import images
from timm.task import ClassificationTask

from timm_gated import (
    Gate,
    GatedBasicBlock,
    GatedCifarResNet,
    GatedNet,
    GateStatistics,
    Objective,
    Term,
    checkpoint_filter_fn,
    count_macs,
    force_gates,
    gates,
    list_gated_models,
)
from timm_gated.layers.gate_state import gate_density, gate_logits, gate_masks
from timm_gated.layers.skip_gates import FeedForwardGate2
from timm_gated.models._builder import build_gated_net
from timm_gated.models._method import GatingMethod


class SaliencyGate(Gate):
    """Keeps the most salient filters and scales them."""

    log_odds = False

    def __init__(self, in_channels, num_gates, density=0.5, device=None, dtype=None):
        super().__init__()
        self.fc = nn.Linear(in_channels, num_gates, device=device, dtype=dtype)
        self.density = density

    @property
    def num_gates(self):
        return self.fc.out_features

    def score(self, x):
        return self.fc(x).relu() + 0.1

    def decide(self, logits):
        kept = logits.topk(round(self.density * self.num_gates)).indices
        return torch.zeros_like(logits).scatter(1, kept, 1.)

    sample = decide

    def weigh(self, mask, logits):
        return mask * logits


def soft_gate() -> Gate:
    gate = FeedForwardGate2(8, 1)
    gate.stage = 'soft'
    return gate.train()


def saliency_block() -> GatedBasicBlock:
    torch.manual_seed(0)
    return GatedBasicBlock(8, 8, gate_layer=SaliencyGate)


@pytest.mark.parametrize('training', [True, False])
def test_state_of_a_saliency_gate(training):
    gate = SaliencyGate(8, 6).train(training)
    out = gate(images(5, 8))
    assert gate.decision.sum(1).tolist() == [3.] * 5 and set(gate.decision.unique().tolist()) == {0., 1.}
    assert torch.equal(out, gate.decision * gate.logits)
    assert torch.equal(gate.mask, gate.decision) and not gate.decision.requires_grad
    assert gate.logits.requires_grad


def test_state_of_a_soft_gate():
    gate = soft_gate()
    out = gate(images(5, 8, 4, 4))
    assert torch.equal(out, torch.sigmoid(gate.logits)) and out is gate.mask
    assert gate.decision.tolist() == [[1.]] * 5  # everything above zero must be computed
    gate.eval()(images(5, 8, 4, 4))
    assert torch.equal(gate.decision, (gate.logits > 0).float()) and torch.equal(gate.mask, gate.decision)


@pytest.mark.parametrize('value', ['open', 'closed'])
def test_forcing_any_gate(value):
    block, forced = saliency_block(), float(value == 'open')
    with force_gates(block, value):
        out = block.gate1(images(5, 8))
    assert torch.equal(out, forced * block.gate1.logits)  # a saliency still scales open channels
    assert (block.gate1.decision == forced).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_any_gate_is_float32_under_autocast(dtype):
    for gate, x in ((SaliencyGate(8, 6), images(5, 8)), (soft_gate(), images(5, 8, 4, 4))):
        with torch.autocast('cpu', dtype=dtype):
            out = gate(x.to(dtype))
        assert out.dtype == gate.logits.dtype == gate.mask.dtype == torch.float32
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in gate.parameters())


def test_any_gate_leaves_its_state_out_of_copies():
    block = saliency_block()
    block(images(2, 8, 4, 4))
    copied = copy.deepcopy(block)
    assert copied.gate1.logits is None and copied.gate1.mask is None and copied.gate1.decision is None
    assert block.gate1.mask is not None


def test_any_gate_compiles_and_exports():
    torch._dynamo.reset()
    block, x = saliency_block().eval(), images(2, 8, 4, 4)
    expected = block(x)
    torch.testing.assert_close(torch.compile(block, backend='aot_eager', fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.export.export(block, (x,)).module()(x), expected)


def test_statistics_and_density_ask_the_gate():
    block = saliency_block().eval()
    block(images(4, 8, 4, 4))
    assert gate_density(block) == {'gate_density': 0.5, 'gate_density_eval': 0.5}
    statistics = GateStatistics()
    statistics.update(block)
    assert statistics.density() == 0.5

    soft = nn.ModuleDict({'gate': soft_gate()})
    soft['gate'](images(4, 8, 4, 4))
    density = gate_density(soft)
    assert density['gate_density'] == pytest.approx(soft['gate'].mask.mean().item())  # soft gates count in part
    assert density['gate_density_eval'] == (soft['gate'].logits > 0).float().mean()
    assert {name: mask.shape for name, mask in gate_masks(soft).items()} == {'gate': (4, 1)}


def test_losses_on_probabilities_refuse_a_saliency():
    block = saliency_block()
    block(images(4, 8, 4, 4))
    with pytest.raises(ValueError, match='SaliencyGate does not compute log-odds'):
        gate_logits(block)


# MACs


def test_saliency_counts_what_it_keeps():
    macs = count_macs(saliency_block(), images(2, 8, 5, 5))
    assert macs.dense == 2 * 9 * 64 * 25
    assert macs.per_sample.tolist() == [9 * 64 * 25 + 8 * 25 + 64] * 2  # half of both convolutions, and the gate


# Networks


class Sparsity(Objective):
    """L1 loss on the masks of correctly classified images."""

    def __init__(self, sparsity=0.1, warm=False):
        super().__init__()
        self.sparsity, self.warm, self.network_name = sparsity, warm, ''

    def attach(self, network):
        self.network_name = type(network).__name__

    def terms(self, model, epoch, step=None):
        right = step.output.argmax(1) == step.target
        loss = torch.cat(list(gate_masks(model).values()), 1).mean(1)[right].sum()
        return {'sparsity_loss': Term(loss, self.sparsity, 'sparsity')}


def make_net(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    model_args = dict(block=GatedBasicBlock, layers=(1, 1, 1), channels=(4, 4, 4))
    return build_gated_net(
        GatedCifarResNet, 'gated_resnet20', False, dense_variant='cifar_resnet20',
        method=GatingMethod(SaliencyGate, dict(gate_density='density'), Sparsity, ('sparsity', 'warm')),
        recipe=dict(sparsity=0.2), **model_args, **kwargs)


def test_a_network_of_another_gate_and_objective():
    model = make_net(gate_density=0.25, warm=True)
    assert {gate.density for _, gate in gates(model)} == {0.25}
    losses = model.gate_losses
    assert isinstance(losses, Sparsity) and (losses.sparsity, losses.warm) == (0.2, True)
    assert losses.network_name == 'GatedCifarResNet'
    assert make_net(sparsity=0.5).gate_losses.sparsity == 0.5
    with pytest.raises(TypeError, match='lam'):
        make_net(lam=0.75)  # an option of another objective
    decayed_not = model.no_weight_decay()
    assert decayed_not == {f'{name}.fc.{p}' for name, _ in gates(model) for p in ('weight', 'bias')}


def test_an_objective_gets_the_step():
    model = make_net()
    x = images(6, 3, 16, 16)
    with torch.no_grad():
        target = model(x).argmax(1)  # these gates have no noise
    target[:2] += 1
    result = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(x, target % 10)
    torch.testing.assert_close(result['sparsity_loss'], torch.tensor(4 * 0.5))
    torch.testing.assert_close(result['loss'], result['task_loss'] + 0.2 * result['sparsity_loss'])


def test_dense_weights_under_a_gating_network(caplog):
    dense = timm.create_model('cifar_resnet20')
    model = timm.create_model('gaternet_resnet20')
    gater = {name: value.clone() for name, value in model.gater.state_dict().items()}
    model.load_state_dict(checkpoint_filter_fn(dense.state_dict(), model))
    assert torch.equal(model.conv1.weight, dense.conv1.weight)
    torch.testing.assert_close(model.gater.state_dict(), gater, rtol=0, atol=0)
    assert 'no weights for' in caplog.text
    assert not any(name.startswith('gater') for name in model.no_weight_decay())

    incomplete = model.state_dict()
    key = next(name for name in incomplete if name.startswith('gater') and name.endswith('bias'))
    del incomplete[key]
    with pytest.raises(RuntimeError, match=f'gater is incomplete in the checkpoint: {key}'):
        model.load_state_dict(incomplete)


def test_gated_models_are_listed_by_class():
    listed = list_gated_models()
    assert set(timm.list_models('gated_*')) <= set(listed)
    assert not any(name.startswith(('cifar_', 'batch_shaped', 'resnet')) for name in listed)
    assert list_gated_models('*resnet34') == [name for name in listed if name.endswith('resnet34')]
    models = (timm.create_model(name, device='meta') for name in listed if name.endswith('resnet20'))
    assert all(isinstance(model, GatedNet) for model in models)
