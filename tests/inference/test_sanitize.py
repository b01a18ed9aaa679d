"""The kernels under AddressSanitizer and UBSan with random programs; `make sanitize` also runs complete networks"""
import subprocess
import sys

from paths import ROOT

TOOL = ROOT / 'tools' / 'dev' / 'sanitize_kernels.py'


def test_kernels():
    command = [sys.executable, TOOL, '--tests', 'test_kernels.py']
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert ' passed' in done.stdout
