"""`python -m timm_gated` runs unmodified scripts of timm with the gated models registered"""
import subprocess
import sys

import pytest

from timm_gated.__main__ import main


def test_runs_a_script_as_python_does(tmp_path):
    (tmp_path / 'beside.py').write_text('value = 42\n')
    script = tmp_path / 'script.py'
    script.write_text(
        'import argparse, sys, timm\n'
        'import beside\n'  # the folder of the script is importable
        'parser = argparse.ArgumentParser()\n'
        'parser.add_argument("--model")\n'
        'args = parser.parse_args()\n'
        'if __name__ == "__main__":\n'
        '    print(parser.prog, beside.value, type(timm.create_model(args.model)).__name__)\n')
    command = [sys.executable, '-m', 'timm_gated', str(script), '--model', 'gated_resnet20']
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ['script.py', '42', 'GatedCifarResNet'], done.stderr


def test_missing_script_says_where_scripts_are(capsys):
    with pytest.raises(SystemExit) as stop:
        main(['validate.py', '--model', 'gated_resnet34'])
    assert stop.value.code == 2 and 'no script at validate.py' in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        main(['--help'])
    assert stop.value.code == 0 and 'validate.py --model gated_resnet34' in ' '.join(capsys.readouterr().out.split())
