"""What it costs to see the gates

Prints how much longer an evaluation takes when everything that tools/analyze_gates.py shows is recorded on the way.
Both sides run the same gated model over the same random images in memory, in turns, and medians are compared.
"""
import argparse
from typing import List, Optional

import timm
import torch
from benchmark_training import interleaved

from timm_gated.analysis import record_classifier


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--model', default='gated_resnet20', help='a gated timm model (default: %(default)s)')
    parser.add_argument('--images', type=int, default=10000, help='images of an evaluation (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=256, help='default: %(default)s')
    parser.add_argument('--rounds', type=int, default=7, help='timed rounds of each side (default: %(default)s)')
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.images < args.batch_size or args.batch_size < 1:
        parser.error('--rounds and --batch-size must be at least 1, and --images at least one batch.')
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
    print(f'{args.model}, {len(batches) * args.batch_size} images in batches of {args.batch_size}, '
          f'{torch.get_num_threads()} threads: plain {seconds["plain"]:.2f} s, recorded {seconds["recorded"]:.2f} s, '
          f'{seconds["recorded"] / seconds["plain"]:.3f} times as long')


if __name__ == '__main__':
    main()
