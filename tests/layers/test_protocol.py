"""The protocol of gates, by methods unlike the paper's: a saliency, a recurrent gate of a block, a gating network"""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from nets import images
from timm.models.resnet import BasicBlock
from timm.task import ClassificationTask

from timm_gated import (
    Gate,
    GatedBasicBlock,
    GatedCifarResNet,
    GatedNet,
    GatePool,
    GateStatistics,
    Gating,
    Objective,
    Term,
    checkpoint_filter_fn,
    count_macs,
    force_gates,
    gates,
    list_gated_models,
)
from timm_gated.layers.gate import apply_gate
from timm_gated.layers.gate_state import gate_density, gate_logits, gate_masks
from timm_gated.models._builder import build_gated_net


class SaliencyGate(Gate):
    """Keeps the most salient filters, and scales them."""

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


class RecurrentGate(Gate):
    """One decision for a block, by an LSTM; soft in training."""

    num_gates = 1

    def __init__(self, in_channels, hidden=10):
        super().__init__()
        self.pool = GatePool()
        self.proj = nn.Linear(in_channels, hidden)
        self.lstm = nn.LSTM(hidden, hidden)
        self.out = nn.Linear(hidden, 1)

    def score(self, x):
        return self.out(self.lstm(self.proj(self.pool(x))[None])[0][0])

    def sample(self, logits):
        return torch.sigmoid(logits)


class SkippedBlock(BasicBlock):
    def __init__(self, inplanes, planes):
        super().__init__(inplanes, planes)
        self.gate = RecurrentGate(inplanes)

    @property
    def gated_convs(self):
        return {'conv1': (None, self.gate), 'conv2': (None, self.gate)}

    def forward(self, x):
        mask = self.gate(x)
        return apply_gate(super().forward(x), mask) + apply_gate(x, 1 - mask)


class Gater(Gating):
    """A network beside the network; hands its input on."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), GatePool(), nn.Linear(4, 32))

    def forward(self, x):
        self.logits = self.net(x)
        return x


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
    gate = RecurrentGate(8).train()
    out = gate(images(5, 8, 4, 4))
    assert torch.equal(out, torch.sigmoid(gate.logits)) and out is gate.mask
    assert gate.decision.tolist() == [[1.]] * 5  # whatever is not zero must be computed
    gate.eval()(images(5, 8, 4, 4))
    assert torch.equal(gate.decision, (gate.logits > 0).float()) and torch.equal(gate.mask, gate.decision)


@pytest.mark.parametrize('value', ['open', 'closed'])
def test_forcing_any_gate(value):
    block, forced = saliency_block(), float(value == 'open')
    with force_gates(block, value):
        out = block.gate1(images(5, 8))
    assert torch.equal(out, forced * block.gate1.logits)  # a saliency still scales what is open
    assert (block.gate1.decision == forced).all()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_any_gate_is_float32_under_autocast(dtype):
    for gate, x in ((SaliencyGate(8, 6), images(5, 8)), (RecurrentGate(8), images(5, 8, 4, 4))):
        with torch.autocast('cpu', dtype=dtype):
            out = gate(x.to(dtype))
        assert out.dtype == gate.logits.dtype == gate.mask.dtype == torch.float32
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in gate.parameters())


def test_any_gate_leaves_its_state_out_of_copies():
    block = saliency_block()
    block(images(2, 8, 4, 4))
    twin = copy.deepcopy(block)
    assert twin.gate1.logits is None and twin.gate1.mask is None and twin.gate1.decision is None
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

    skipped = SkippedBlock(8, 8).train()
    skipped(images(4, 8, 4, 4))
    density = gate_density(skipped)
    assert density['gate_density'] == pytest.approx(skipped.gate.mask.mean().item())  # open in part, as it is soft
    assert density['gate_density_eval'] == (skipped.gate.logits > 0).float().mean()
    assert {name: mask.shape for name, mask in gate_masks(skipped).items()} == {'gate': (4, 1)}


def test_losses_on_probabilities_refuse_a_saliency():
    block = saliency_block()
    block(images(4, 8, 4, 4))
    with pytest.raises(ValueError, match='SaliencyGate does not compute log-odds'):
        gate_logits(block)


# MACs


def test_block_that_is_skipped_by_hand():
    block = SkippedBlock(8, 8)
    with force_gates(block, {'gate': [[0], [1], [1]]}):
        macs = count_macs(block, images(3, 8, 5, 7))
    convs = 2 * 9 * 8 * 8 * 35
    overhead = 8 * 35 + 8 * 10 + 4 * 10 * (10 + 10) + 10
    assert macs.dense == convs
    assert macs.per_sample.tolist() == [overhead, convs + overhead, convs + overhead]


@pytest.mark.parametrize('module, shape, samples, expected', [
    (nn.LSTM(6, 5), (1, 3, 6), 3, 4 * 5 * (6 + 5)),
    (nn.LSTM(6, 5), (7, 3, 6), 3, 7 * 4 * 5 * (6 + 5)),
    (nn.LSTM(6, 5, num_layers=2, batch_first=True), (3, 7, 6), 3, 7 * 4 * 5 * ((6 + 5) + (5 + 5))),
    (nn.LSTM(6, 5, bidirectional=True), (1, 3, 6), 3, 2 * 4 * 5 * (6 + 5)),
    (nn.GRU(6, 5), (1, 3, 6), 3, 3 * 5 * (6 + 5)),
    (nn.LSTMCell(6, 5), (3, 6), 3, 4 * 5 * (6 + 5)),
])
def test_recurrent_layers(module, shape, samples, expected):
    macs = count_macs(module, images(*shape))
    assert macs.dense == expected and macs.per_sample.tolist() == [expected] * samples


def test_saliency_counts_what_it_keeps():
    macs = count_macs(saliency_block(), images(2, 8, 5, 5))
    assert macs.dense == 2 * 9 * 64 * 25
    assert macs.per_sample.tolist() == [9 * 64 * 25 + 8 * 25 + 64] * 2  # half of both convolutions, and the gate


def test_gating_network_is_overhead():
    model = nn.Sequential(Gater(), nn.Conv2d(3, 5, 1))
    macs = count_macs(model, images(2, 3, 6, 6))
    assert macs.dense == 3 * 5 * 36
    assert macs.per_sample.tolist() == [3 * 5 * 36 + 9 * 3 * 4 * 16 + 4 * 16 + 4 * 32] * 2


# Networks


class Sparsity(Objective):
    """L1 on the masks, for the images that are right."""

    def __init__(self, sparsity=0.1, warm=False):
        super().__init__()
        self.sparsity, self.warm, self.network_name = sparsity, warm, ''

    def attach(self, network):
        self.network_name = type(network).__name__

    def terms(self, model, epoch, step=None):
        right = step.output.argmax(1) == step.target
        loss = torch.cat(list(gate_masks(model).values()), 1).mean(1)[right].sum()
        return {'sparsity_loss': Term(loss, self.sparsity, 'sparsity')}


class GaterNet(GatedCifarResNet):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gater = Gater()


def make_net(model_cls=GatedCifarResNet, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    model_args = dict(block=GatedBasicBlock, layers=(1, 1, 1), channels=(4, 4, 4))
    return build_gated_net(
        model_cls, 'gated_resnet20', False, dense_variant='cifar_resnet20', gate_layer=SaliencyGate,
        objective=Sparsity, recipe=dict(sparsity=0.2), **model_args, **kwargs)


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


def test_an_objective_sees_what_the_step_came_to():
    model = make_net()
    x = images(6, 3, 16, 16)
    with torch.no_grad():
        target = model(x).argmax(1)  # no noise here: training gives the same
    target[:2] += 1
    result = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(x, target % 10)
    torch.testing.assert_close(result['sparsity_loss'], torch.tensor(4 * 0.5))
    torch.testing.assert_close(result['loss'], result['task_loss'] + 0.2 * result['sparsity_loss'])


def test_dense_weights_under_a_gating_network(caplog):
    dense = timm.create_model('cifar_resnet20', layers=(1, 1, 1), channels=(4, 4, 4))
    model = make_net(GaterNet)
    fresh = model.gater.net[0].weight.clone()
    model.load_state_dict(checkpoint_filter_fn(dense.state_dict(), model))
    assert torch.equal(model.conv1.weight, dense.conv1.weight) and torch.equal(model.gater.net[0].weight, fresh)
    assert 'no weights for 4 of 4 gates' in caplog.text
    assert not any(name.startswith('gater') for name in model.no_weight_decay())

    half = model.state_dict()
    del half['gater.net.3.bias']
    with pytest.raises(RuntimeError, match='gater is incomplete in the checkpoint: gater.net.3.bias'):
        model.load_state_dict(half)


def test_gated_models_are_listed_by_what_they_are():
    listed = list_gated_models()
    assert set(timm.list_models('gated_*')) <= set(listed)
    assert not any(name.startswith(('cifar_', 'batch_shaped', 'resnet')) for name in listed)
    assert list_gated_models('*resnet34') == [name for name in listed if name.endswith('resnet34')]
    assert all(isinstance(timm.create_model(name, device='meta'), GatedNet) for name in listed if '20' in name)
