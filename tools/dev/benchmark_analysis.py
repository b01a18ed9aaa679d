"""Benchmark the cost of recording gates

Prints how much longer an evaluation takes if it also records the gates for tools/analyze_gates.py. Both variants run
the same untrained gated model on the same random images in memory. They are timed alternately, and medians
are compared.

    python tools/dev/benchmark_analysis.py --model gated_resnet34 --images 256 --batch-size 64
"""
import sys
from typing import List, Optional

from benchmark_training import interleaved

from timm_gated_cli._options import make_parser


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument('--model', default='gated_resnet20', help='gated timm model (default: %(default)s)')
    parser.add_argument('--images', type=int, default=10000, help='images per evaluation (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=256, help='batch size (default: %(default)s)')
    parser.add_argument('--rounds', type=int, default=7, help='timed rounds per variant (default: %(default)s)')
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.images < args.batch_size or args.batch_size < 1:
        parser.error('--rounds and --batch-size must be at least 1, and --images at least one batch.')

    import timm
    import torch

    from timm_gated.analysis import record_classifier
    from timm_gated.models import check_model_name
    try:
        check_model_name(args.model)
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    torch.manual_seed(0)
    model = timm.create_model(args.model).eval()
    size = model.pretrained_cfg['input_size']
    batch = torch.randn(args.batch_size, *size), torch.randint(model.num_classes, (args.batch_size,))
    batches = [batch] * (args.images // args.batch_size)
    names = [str(index) for index in range(model.num_classes)]

    @torch.inference_mode()
    def plain() -> None:
        sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)

    def recorded() -> None:
        record_classifier(model, batches, names)

    seconds = interleaved({'plain': plain, 'recorded': recorded}, args.rounds)
    print(f'{args.model} (untrained), {len(batches) * args.batch_size} images in batches of {args.batch_size}, '
          f'{torch.get_num_threads()} threads: plain {seconds["plain"]:.2f} s, recorded {seconds["recorded"]:.2f} s, '
          f'{seconds["recorded"] / seconds["plain"]:.3f} times as long')
    return 0


if __name__ == '__main__':
    sys.exit(main())
