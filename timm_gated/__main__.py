"""Run one of timm's scripts with the gated models registered

timm's train.py can import plugins (`--device-modules timm_gated`, or `device_modules` in a YAML). Its other scripts
cannot, so this module imports the package and runs them: python -m timm_gated validate.py --model gated_resnet34 …
"""
import argparse
import runpy
import sys
from pathlib import Path
from typing import List, Optional

import timm_gated  # noqa: F401  (registers the models)


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog='python -m timm_gated',
        description="Run one of timm's scripts with the gated models registered.",
        epilog="The scripts are in timm's repository, https://github.com/huggingface/pytorch-image-models, not in its "
               'package. Example: "python -m timm_gated validate.py --model gated_resnet34 --data-dir DIR". '
               'benchmark.py, inference.py and onnx_export.py work likewise. For train.py use its own option, '
               '--device-modules timm_gated.',
    )
    parser.add_argument('script', type=Path, help='path of the script')
    parser.add_argument('args', nargs=argparse.REMAINDER, metavar='…', help='arguments of the script')
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.error(f"no script at {options.script}; give the path of a script from timm's repository.")
    # As `python script.py` does.
    sys.argv = [str(options.script), *options.args]
    sys.path[0] = str(options.script.resolve().parent)
    runpy.run_path(str(options.script), run_name='__main__')


if __name__ == '__main__':
    main()
