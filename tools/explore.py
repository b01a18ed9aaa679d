"""Explore a gated network in the browser: give it an image, see which filters ran and what they cost

    timm-gated explore --model gated_resnet20.bas_c10
    timm-gated explore --model gated_resnet20.bas_c10 --data-dir data/cifar10
    timm-gated explore --model gated_resnet34 --checkpoint model_best.pth.tar --data-dir data/imagenet --limit 5000

The page shows the predicted classes, the filters of each layer that ran, the MACs, and milliseconds beside the dense
network. Without a checkpoint, the pretrained weights of the model are explored.

With --data-dir, it records the gates of --limit images first, spread evenly over --split. The page then also shows
where the MACs of the image lie in their distribution, and the images with the most similar gates.

The server is reached from this machine only, unless --host says otherwise. Nothing is sent elsewhere and nothing is
written; uploads are kept in memory. To publish it as a Space of Hugging Face, see docs/explore.md.
"""
from __future__ import annotations

import argparse
import sys
from typing import List, Optional
from urllib.parse import urlsplit

from timm_gated_cli._options import add_data_options, add_model_options, execute, make_parser


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--checkpoint', default='', metavar='FILE', help='weights of the model')
    parser.add_argument(
        '--limit', type=int, default=2000, metavar='N', help='number of images to record (default: %(default)s)')
    parser.add_argument(
        '--accelerate', action=argparse.BooleanOptionalAction, default=True,
        help='time the accelerated network and its dense counterpart for each image, on the CPU (default: yes)')
    group = parser.add_argument_group('server')
    group.add_argument('--host', default='127.0.0.1', help='address to listen on (default: %(default)s)')
    group.add_argument(
        '--port', type=int, default=7860, metavar='N', help='port; 0 for a free one (default: %(default)s)')
    group.add_argument(
        '--allow-host', nargs='+', default=[], metavar='NAME',
        help='names under which a browser may reach the server, besides localhost and IP addresses')
    group.add_argument(
        '--embed-in', nargs='+', default=[], metavar='ORIGIN',
        help='sites that may show the page in a frame, such as https://example.org (default: none)')
    add_model_options(parser)
    add_data_options(parser)
    args = parser.parse_args(argv)
    if not args.model:
        parser.error('give --model, a gated timm model such as gated_resnet20.bas_c10.')
    if args.limit < 1:
        parser.error(f'--limit must be at least 1, got {args.limit}.')
    if not 0 <= args.port < 65536:
        parser.error(f'--port must be in [0, 65535], got {args.port}.')
    for origin in args.embed_in:
        parts = urlsplit(origin)
        if origin != f'{parts.scheme}://{parts.netloc}' or parts.scheme not in ('http', 'https') or ';' in origin:
            parser.error(f'--embed-in must be an origin such as https://example.org, got {origin}.')
    args.device = args.device or ('cpu' if args.accelerate else '')
    return args


def run(args: argparse.Namespace) -> None:
    from timm_gated_cli._explore_server import ExploreServer
    from timm_gated_cli._explorer import Explorer
    explorer = Explorer(args)
    try:
        server = ExploreServer((args.host, args.port), explorer, args.allow_host, args.embed_in)
    except OSError as error:
        raise ValueError(
            f'cannot listen on {args.host}, port {args.port}: {error.strerror}. Choose another --port, or --port 0 for '
            f'a free one.') from error
    with server:
        print(f'{explorer.title}: http://{args.host}:{server.server_port} (Ctrl+C stops it)', flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
