"""MACs by layer and by call: functions, samples, uncounted products, threads"""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import images, shuffle
from test_macs import gate_macs

from timm_gated import (
    ChannelGate,
    GatedBasicBlock,
    MacCounter,
    count_macs,
    force_gates,
    mac_formula,
)


def test_a_module_that_runs_twice_counts_twice():
    conv = nn.Conv2d(3, 3, 1)
    assert count_macs(nn.Sequential(conv, nn.ReLU(), conv), images(1, 3, 4, 4)).dense == 2 * 9 * 16


@pytest.mark.parametrize('module, shape, expected', [
    (nn.Conv2d(6, 4, (3, 1), stride=2, padding=(1, 0), groups=2), (2, 6, 7, 9), 4 * 3 * 3 * 4 * 5),
    (nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 10), 6 * 4 * 3 * 6),
    (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 5, 5), 4 * 6 * 4 * 25),
    (nn.Linear(7, 5), (2, 7), 35),
    (nn.Linear(7, 5), (2, 3, 7), 3 * 35),
])
def test_other_layers(module, shape, expected):
    macs = count_macs(module, images(*shape))
    assert macs.dense == expected and macs.per_sample.tolist() == [expected] * 2


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


class Functions(nn.Module):
    """Layers without modules."""

    def __init__(self):
        super().__init__()
        self.kernel, self.matrix = nn.Parameter(torch.ones(5, 3, 3, 3)), nn.Parameter(torch.ones(4, 5))

    def forward(self, x):
        x = F.conv2d(input=x, weight=self.kernel - self.kernel.mean(), stride=2)
        return F.linear(weight=self.matrix, input=x.mean((2, 3)))


def test_functions_count():
    macs = count_macs(nn.Sequential(Functions()), images(2, 3, 9, 9))
    assert macs.dense == 5 * 27 * 16 + 20 and macs.per_sample.tolist() == [macs.dense] * 2
    assert list(macs.by_module) == ['0']


@pytest.mark.parametrize('call', [
    lambda x, weight: torch.convolution(x, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
    lambda x, weight: torch.ops.aten.conv2d(x, weight),
    lambda x, weight: torch.ops.aten.conv2d.default(x, weight),
    lambda x, weight: torch.ops.aten.convolution.default(
        input=x, weight=weight.transpose(0, 1), bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1),
        transposed=True, output_padding=(0, 0), groups=1),
    lambda x, weight: torch.ops.aten.linear.default(x.movedim(1, -1), weight.flatten(1)),
    lambda x, weight: torch.vmap(lambda image: F.conv2d(image, weight))(x),
    lambda x, weight: torch.vmap(torch.vmap(lambda pixel: F.linear(pixel, weight.flatten(1))))(x.flatten(2).mT),
], ids=['convolution', 'packet', 'overload', 'transposed', 'linear', 'vmap', 'vmaps'])
def test_other_ways_to_call_a_function(call):
    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.ones(5, 3, 1, 1))

        def forward(self, x):
            return call(x, self.kernel)

    macs = count_macs(nn.Sequential(nn.Conv2d(3, 3, 1), Call()), images(2, 3, 4, 4))
    assert macs.by_module['1'].per_sample.tolist() == [15 * 16] * 2 and not macs.uncounted


def test_keyword_inputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 5, 1), nn.Linear(5, 7)

        def forward(self, images):
            return self.fc(input=self.conv(input=images).mean((2, 3)))

    with MacCounter(model := Named()) as counter:
        model(images=images(2, 3, 4, 4))
    assert counter.macs().per_sample.tolist() == [15 * 16 + 35] * 2
    assert list(counter.macs().by_module) == ['conv', 'fc']


@pytest.mark.parametrize('kwargs, projections', [
    (dict(batch_first=True), 8 * 8 * (5 + 7 + 7 + 5)),
    (dict(batch_first=False), 8 * 8 * (5 + 7 + 7 + 5)),
    (dict(batch_first=True, kdim=6, vdim=4), 8 * (8 * 5 + 6 * 7 + 4 * 7 + 8 * 5)),
])
@pytest.mark.parametrize('need_weights', [True, False])
def test_projections_of_attention(kwargs, projections, need_weights):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, **kwargs)

        def forward(self, x):
            sizes = (5, 8), (7, kwargs.get('kdim', 8)), (7, kwargs.get('vdim', 8))
            inputs = [x[:, :length, :dim] for length, dim in sizes]
            if not self.attn.batch_first:
                inputs = [part.transpose(0, 1) for part in inputs]
            return self.attn(*inputs, need_weights=need_weights)

    macs = count_macs(Attention(), images(3, 7, 8))
    assert macs.per_sample.tolist() == [projections] * 3 and list(macs.by_module) == ['attn']
    assert macs.uncounted == {'multi_head_attention_forward': ['attn']}


def test_encoder_layers_are_seen_in_evaluation():
    """torch has a single operator for them, which hides its products."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert count_macs(layer, images(3, 7, 8)).per_sample.tolist() == [7 * (4 * 64 + 2 * 128)] * 3


# Samples


class Windows(nn.Module):
    """Runs a module on the four quarters of each image."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        n, c, h, w = x.shape
        x = x.view(n, c, 2, h // 2, 2, w // 2).permute(0, 2, 4, 1, 3, 5).reshape(n * 4, c, h // 2, w // 2)
        return self.inner(x)


def test_windows_are_no_samples():
    macs = count_macs(Windows(nn.Conv2d(3, 5, 3)), images(2, 3, 8, 8))
    assert macs.per_sample.tolist() == [4 * 5 * 27 * 4] * 2 and macs.dense == 4 * 5 * 27 * 4


def test_swin_tiny():
    """Published: 4.5 G, including the products of attention, which are not counted."""
    formula = mac_formula(timm.create_model('swin_tiny_patch4_window7_224'), (3, 224, 224))
    assert formula.dense == formula.fixed == 4350425088


def test_work_that_the_batch_shares():
    """It is computed once per batch, and its MACs are divided among the images."""
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x):
            return self.fc(torch.ones(10, 4)).sum() + x

    assert [count_macs(Table(), images(n, 3)).per_sample.tolist() for n in (1, 2)] == [[240], [120] * 2]


def test_gates_over_windows():
    model = Windows(shuffle(GatedBasicBlock(8, 8)))
    x = images(2, 8, 8, 8)
    with pytest.raises(ValueError, match="'inner.conv1' decided about 8 inputs in a batch of 2 images"):
        count_macs(model, x)
    for image in x.split(1):
        macs = count_macs(model, image)
        num_open = int(model.inner.gate1.decision.sum())
        assert macs.per_sample.tolist() == [2 * 9 * 8 * 16 * num_open + 4 * (8 * 16 + gate_macs(8, 8))]
        assert macs.dense == 4 * 2 * 9 * 8 * 8 * 16


def test_number_of_samples_can_be_given():
    conv = nn.Conv2d(3, 5, 1)
    with MacCounter(conv, num_samples=2) as counter:
        conv(images(8, 3, 4, 4))
    assert counter.macs().per_sample.tolist() == [4 * 15 * 16] * 2


# Uncounted products are reported


def test_products_are_named():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            x = self.fc(x) @ x.transpose(1, 2)
            x = torch.bmm(x, x) + torch.einsum('bij,bjk->bik', x, x)
            return F.scaled_dot_product_attention(x, x, x)

    macs = count_macs(nn.Sequential(Products()), images(2, 5, 4))
    assert macs.dense == 5 * 16
    assert macs.uncounted == {name: ['0'] for name in ('matmul', 'bmm', 'einsum', 'scaled_dot_product_attention')}


def test_layers_that_nobody_saw_are_named():
    class Extension(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return torch.from_numpy(x.numpy() @ self.weight.detach().numpy())

    model = nn.Sequential(nn.Embedding(7, 4), Extension(), nn.LayerNorm((5, 4)), nn.Linear(4, 3))
    macs = count_macs(model, torch.ones(2, 5, dtype=torch.long))
    assert macs.dense == 5 * 12 and macs.uncounted == {'Extension': ['1']}
    assert not count_macs(timm.create_model('gated_resnet20'), images(1, 3, 32, 32)).uncounted


@pytest.mark.filterwarnings('ignore')  # torch.ao.quantization is deprecated
def test_quantized_layers_are_named():
    layers = nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 5)
    dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(*layers), {nn.Linear})
    macs = count_macs(dynamic, images(2, 3, 4, 4))
    assert macs.dense == 12 * 16 and macs.uncounted == {'Linear': ['2']}

    static = nn.Sequential(nn.Conv2d(3, 3, 1), torch.ao.quantization.QuantStub(), nn.Conv2d(3, 4, 1)).eval()
    static[1].qconfig = static[2].qconfig = torch.ao.quantization.get_default_qconfig()
    torch.ao.quantization.prepare(static, inplace=True)
    static(images(2, 3, 4, 4))
    torch.ao.quantization.convert(static, inplace=True)
    macs = count_macs(static, images(2, 3, 4, 4))
    assert macs.dense == 9 * 16 and macs.uncounted == {'Conv2d': ['2']}


# Other threads, and other ways to run a model


def in_another_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_calls_of_another_thread_do_not_count():
    """Not even during a pass, when other threads have overwritten the decisions of the gates."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    x = images(2, 3, 16, 16)
    expected = count_macs(model, x)
    others = []

    def interrupt(*args) -> None:
        if threading.current_thread() is threading.main_thread():
            in_another_thread(lambda: others.append(model(5 * images(4, 3, 16, 16))))

    model.layer2[0].gate1.register_forward_hook(interrupt)
    macs = count_macs(model, x)
    assert len(others) == 1 and model.layer2[0].gate1.mask.shape[0] == 4  # the decisions differ
    assert macs.dense == expected.dense and torch.equal(macs.per_sample, expected.per_sample)


def test_threads_count_for_themselves():
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    batches = [scale * images(n, 3, 16, 16) for n, scale in ((1, 1), (2, 5), (3, 0.2), (4, 2))]
    expected = [count_macs(model, x).per_sample.tolist() for x in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: count_macs(model, x).per_sample.tolist(), batches * 10))
    assert found == expected * 10


def test_nothing_is_left_on_the_modules_while_counting():
    """Another thread would run such a hook."""
    model = timm.create_model('gated_resnet20', layers=(1, 1, 1)).eval()
    before = [dict(vars(module)) for module in model.modules()]
    with MacCounter(model):
        assert hooks(model) == 0 and [dict(vars(module)) for module in model.modules()] == before


def test_what_else_runs_in_the_context_does_not_count():
    model, other = nn.Conv2d(3, 5, 1), nn.Conv2d(3, 5, 1)
    x = images(2, 3, 4, 4)
    with MacCounter(model) as counter:
        F.conv2d(other(x), torch.ones(5, 5, 1, 1))
        model(x)
    assert counter.macs().per_sample.tolist() == [15 * 16] * 2


def test_counters_within_each_other():
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    x = images(2, 3, 16, 16)
    with MacCounter(model) as outer:
        with MacCounter(model.layer1) as inner:
            model(x)
    expected = count_macs(model, x)
    assert torch.equal(outer.macs().per_sample, expected.per_sample)
    assert {f'layer1.{name}' for name in inner.macs().by_module} == {
        name for name in expected.by_module if name.startswith('layer1.')}


def test_compiled_model():
    torch._dynamo.reset()
    block, x = shuffle(GatedBasicBlock(8, 8)).eval(), images(2, 8, 6, 6)
    compiled = torch.compile(block, backend='eager')
    with torch.no_grad():
        compiled(x)
    assert torch.equal(count_macs(compiled, x).per_sample, count_macs(block, x).per_sample)


def test_autocast():
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    x = images(2, 3, 16, 16)
    with force_gates(model, 'open'):
        expected = count_macs(model, x)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            macs = count_macs(model, x)
    assert torch.equal(macs.per_sample, expected.per_sample) and list(macs.by_module) == list(expected.by_module)


# The model is not changed


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize('fails', [False, True])
def test_modes_and_hooks_are_restored(fails):
    model = timm.create_model('gated_resnet20').train()
    model.layer2.eval()
    model.layer3[0].gate1.eval()
    model.layer2[1].bn1.train()
    seen = []
    model.layer1[0].conv1.register_forward_hook(lambda *args: seen.append(1))
    modes = [module.training for module in model.modules()]
    assert 0 < sum(modes) < len(modes)
    if fails:
        with pytest.raises(RuntimeError, match='channels'):
            count_macs(model, images(2, 4, 32, 32))
    else:
        count_macs(model, images(2, 3, 32, 32))
        assert seen == [1]
    assert [module.training for module in model.modules()] == modes
    assert hooks(model) == 1


def test_counting_in_training_mode_leaves_no_trace():
    model = shuffle(timm.create_model('gated_resnet20')).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    epoch_begins = model.gate_losses.epoch_begins = False
    x = images(2, 3, 32, 32)
    macs = count_macs(model, x)
    assert torch.equal(macs.per_sample, count_macs(model.eval(), x).per_sample)  # without noise
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.gate_losses.epoch_begins == epoch_begins  # counting begins no epoch
    assert all(p.grad is None for p in model.parameters())


def test_a_lone_gate():
    macs = count_macs(ChannelGate(8, 12), images(2, 8))
    assert macs.dense == 0 and macs.per_sample.tolist() == [gate_macs(8, 12)] * 2
