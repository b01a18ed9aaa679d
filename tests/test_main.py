"""python -m timm_gated runs timm's scripts, unmodified, with the gated models registered"""
import subprocess
import sys


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-m', 'timm_gated', *args], capture_output=True, text=True, timeout=120)


def test_runs_a_script_as_python_does(tmp_path):
    (tmp_path / 'beside.py').write_text('value = 42\n')
    script = tmp_path / 'script.py'
    script.write_text(
        'import argparse, sys, timm\n'
        'import beside\n'  # a script sees its own folder
        'parser = argparse.ArgumentParser()\n'
        'parser.add_argument("--model")\n'
        'args = parser.parse_args()\n'
        'if __name__ == "__main__":\n'
        '    print(parser.prog, beside.value, type(timm.create_model(args.model)).__name__)\n')
    done = run(str(script), '--model', 'gated_resnet20')
    assert done.stdout.split() == ['script.py', '42', 'GatedCifarResNet'], done.stderr


def test_missing_script_says_where_scripts_are():
    done = run('validate.py', '--model', 'gated_resnet34')
    assert done.returncode == 2 and 'no script at validate.py' in done.stderr and 'Traceback' not in done.stderr


def test_help_teaches():
    done = run('--help')
    assert done.returncode == 0 and 'validate.py --model gated_resnet34' in ' '.join(done.stdout.split())
