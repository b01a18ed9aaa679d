"""Benchmark the cost of gating in training

Prints three ratios:

    1. the CDF of the Beta prior, forward and backward: SciPy through NumPy over `timm_gated.beta_cdf`;
    2. the batch-shaping loss, forward and backward: with the SciPy CDF over `timm_gated.batch_shaping_loss`;
    3. the training step: `gated_resnet34` with batch shaping and L0 over timm's dense `resnet34`.

With --only options, it prints images per second of networks under the options of timm's train.py that may be faster:
bfloat16 autocast, channels_last and torch.compile; gated networks also with distillation from their dense counterpart.

1 and 2 use 256 images x 3776 gates (a gated ResNet-34) and one thread. Both sides of a ratio are timed alternately, and
medians are compared, because machines are noisy. The networks are untrained.

    python tools/dev/benchmark_training.py --only losses
    python tools/dev/benchmark_training.py --only step --depth 50 --batch-size 16
    python tools/dev/benchmark_training.py --only options --networks cifar_resnet20 gated_resnet20 --batch-size 128
"""
from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

from tqdm import tqdm

from timm_gated_cli._options import format_table, make_parser

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

A, B = 0.6, 0.4


def scipy_losses() -> Tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """CDF and batch-shaping loss with cdf and pdf of scipy.stats.beta, through NumPy."""
    import numpy as np
    import scipy.stats
    import torch

    class ScipyBetaCDF(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return torch.from_numpy(scipy.stats.beta.cdf(x.detach().numpy(), A, B).astype(np.float32))

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            x, = ctx.saved_tensors
            return grad * torch.from_numpy(scipy.stats.beta.pdf(x.numpy(), A, B).astype(np.float32))

    def batch_shaping_loss(x: torch.Tensor) -> torch.Tensor:
        """Loss as defined in the paper, with the SciPy CDF."""
        n = x.shape[0]
        expected = torch.arange(1, n + 1, dtype=x.dtype)[:, None] / (n + 1)
        return (expected - ScipyBetaCDF.apply(torch.sort(x, dim=0).values)).square().mean(0).sum()

    return ScipyBetaCDF.apply, batch_shaping_loss


def interleaved(sides: Dict[str, Callable[[], None]], rounds: int) -> Dict[str, float]:
    """Median seconds of each function, timed alternately."""
    times: Dict[str, List[float]] = {name: [] for name in sides}
    for index in tqdm(range(rounds + 1), desc=' / '.join(sides), leave=False):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if index:  # the first round is a warm-up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def benchmark_losses(rounds: int) -> None:
    import torch

    from timm_gated import Beta, batch_shaping_loss, beta_cdf
    torch.manual_seed(0)
    x = torch.sigmoid(2 * torch.randn(256, 3776)).requires_grad_()
    prior = Beta(A, B)
    scipy_cdf, scipy_batch_shaping_loss = scipy_losses()
    sides: Dict[str, Callable[[], torch.Tensor]] = {
        'scipy cdf': lambda: scipy_cdf(x).sum(),
        'beta_cdf': lambda: beta_cdf(x, A, B).sum(),
        'scipy loss': lambda: scipy_batch_shaping_loss(x),
        'batch_shaping_loss': lambda: batch_shaping_loss(x, prior),
    }
    torch.testing.assert_close(sides['scipy cdf'](), sides['beta_cdf']())
    torch.testing.assert_close(sides['scipy loss'](), sides['batch_shaping_loss']())

    def forward_backward(function: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            function().backward()
        return run

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = interleaved({name: forward_backward(function) for name, function in sides.items()}, rounds)
    torch.set_num_threads(threads)
    for slow, fast in (('scipy cdf', 'beta_cdf'), ('scipy loss', 'batch_shaping_loss')):
        print(f'{fast}: {1e3 * seconds[fast]:.1f} ms against {1e3 * seconds[slow]:.1f} ms with SciPy, '
              f'{seconds[slow] / seconds[fast]:.1f} times as fast')


def benchmark_step(rounds: int, depth: int, batch_size: int, image_size: int) -> None:
    import timm
    import torch
    import torch.nn as nn
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask

    import timm_gated  # noqa: F401  (registers the gated models)
    torch.manual_seed(0)
    images, labels = torch.randn(batch_size, 3, image_size, image_size), torch.randint(1000, (batch_size,))

    def training_step(model: nn.Module) -> Callable[[], None]:
        task = ClassificationTask(model.train(), nn.CrossEntropyLoss(), verbose=False)
        optimizer = create_optimizer_v2(model, opt='sgd', lr=1e-3, weight_decay=1e-4)

        def run() -> None:
            optimizer.zero_grad()
            task(images, labels)['loss'].backward()
            optimizer.step()
        return run

    gated = timm.create_model(f'gated_resnet{depth}', lam_epochs='fixed', gamma_epochs='fixed')  # both losses enabled
    seconds = interleaved({
        'dense': training_step(timm.create_model(f'resnet{depth}')),
        'gated': training_step(gated),
    }, rounds)
    print(f'untrained, training step at {image_size} px, batch {batch_size}, {torch.get_num_threads()} threads: '
          f'resnet{depth} {seconds["dense"]:.2f} s, gated_resnet{depth} with both losses {seconds["gated"]:.2f} s, '
          f'{seconds["gated"] / seconds["dense"]:.3f} times as long')


def benchmark_options(rounds: int, networks: Sequence[str], batch_size: int) -> None:
    import timm
    import torch
    import torch.nn as nn
    from timm.optim import create_optimizer_v2
    from timm.task import ClassificationTask, LogitDistillationTask

    from timm_gated import GatedNet

    def training_step(
            name: str, bfloat16: bool, channels_last: bool, compiled: bool, distil: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model: Any = timm.create_model(name).train()
        layout = torch.channels_last if channels_last else torch.contiguous_format
        images = torch.randn(batch_size, *model.default_cfg['input_size']).to(memory_format=layout)
        labels = torch.randint(model.num_classes, (batch_size,))
        optimizer = create_optimizer_v2(model, opt='sgd', lr=1e-3, weight_decay=1e-4)
        task: Any
        if distil:
            teacher = timm.create_model(model.dense_variant, **model.dense_args)
            task = LogitDistillationTask(model, teacher, criterion=nn.CrossEntropyLoss(), verbose=False)
        else:
            task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
        task.to(memory_format=layout)
        task.train()
        if compiled:
            task.compile()

        def run() -> None:
            optimizer.zero_grad()
            with torch.autocast('cpu', torch.bfloat16, enabled=bfloat16):
                loss = task(images, labels)['loss']
            loss.backward()
            optimizer.step()
        return run

    options = {
        'float32': (False, False, False), 'float32, channels_last': (False, True, False),
        'bfloat16': (True, False, False), 'bfloat16, channels_last': (True, True, False),
        'bfloat16, compiled': (True, False, True), 'bfloat16, channels_last, compiled': (True, True, True),
    }
    print(f'untrained, images/s, batch {batch_size}, {torch.get_num_threads()} threads')
    rows = []
    for name in networks:
        is_gated = isinstance(timm.create_model(name, device='meta'), GatedNet)
        for distil in (False, True)[:1 + is_gated]:
            torch._dynamo.reset()
            seconds = interleaved({
                option: training_step(name, *flags, distil) for option, flags in options.items()}, rounds)
            label = f'{name}, distilled' if distil else name
            rows.append([label, *(f'{batch_size / value:.0f}' for value in seconds.values())])
    print(format_table([['', *options], *rows]))


def main(argv: Optional[List[str]] = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument('--rounds', type=int, default=11, help='timed rounds per variant (default: %(default)s)')
    parser.add_argument('--depth', type=int, default=34, choices=(18, 34, 50, 101, 152), help='default: %(default)s')
    parser.add_argument('--batch-size', type=int, default=32, help='default: %(default)s')
    parser.add_argument('--image-size', type=int, default=128, help='default: %(default)s')
    parser.add_argument('--only', choices=('losses', 'step', 'options'), help='run only this part (default: losses and '
                        'step)')
    parser.add_argument('--networks', nargs='+', default=['cifar_resnet20', 'gated_resnet20'], metavar='NAME',
                        help='networks of --only options (default: cifar_resnet20 gated_resnet20)')
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f'--rounds must be at least 1, got {args.rounds}.')
    if args.only == 'options':
        return benchmark_options(args.rounds, args.networks, args.batch_size)
    if args.only != 'step':
        benchmark_losses(args.rounds)
    if args.only != 'losses':
        benchmark_step(args.rounds, args.depth, args.batch_size, args.image_size)


if __name__ == '__main__':
    main()
