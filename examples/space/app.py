"""The explorer as a Space of Hugging Face

Further options go to `timm-gated explore`, for example `python app.py --model gated_resnet20.l0_c10`.
"""
import os
import sys

from timm_gated_cli.explore import main

OPTIONS = ['--model', 'gated_resnet20.bas_c10', '--host', '0.0.0.0', '--embed-in', 'https://huggingface.co']

if __name__ == '__main__':
    space = os.environ.get('SPACE_HOST')  # set by Spaces
    sys.exit(main([*OPTIONS, *(['--allow-host', space] if space else []), *sys.argv[1:]]))
