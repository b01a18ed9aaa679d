"""Run the tests of the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer

Builds the kernels into a copy of the package in a temporary folder and runs the tests of programs, networks and inputs
on it. Blocks are small, so that most maps need several. A sanitizer report aborts the tests. Other arguments are passed
to pytest. EXAMPLES_TIMES=10 in the environment draws ten times as many programs and networks.

    python tools/dev/sanitize_kernels.py --tests test_kernels.py -x
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from timm_gated_cli._options import make_parser

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    'test_kernels.py', 'test_int8.py', 'test_accelerate.py', 'test_accelerate_inputs.py', 'test_accelerate_random.py',
    'test_accelerate_variants.py', 'test_int8_networks.py')


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument('--tests', nargs='+', default=TESTS, choices=TESTS, metavar='FILE', help=', '.join(TESTS))
    args, pytest_args = parser.parse_known_args()
    compiler = os.environ.get('CC', 'gcc')
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / 'timm_gated'
        shutil.copytree(ROOT / 'timm_gated', package, ignore=shutil.ignore_patterns('*.so', '__pycache__'))
        library = package / '_native.so'
        sources = map(str, sorted((package / 'csrc').glob('*.c')))
        subprocess.run([
            compiler, '-std=gnu11', '-O0', '-g', '-fno-omit-frame-pointer',
            '-fsanitize=address,undefined,float-divide-by-zero,float-cast-overflow', '-fno-sanitize-recover=all',
            '-DCACHE_BYTES=65536', '-pthread', '-shared', '-fPIC', '-Wall', '-Wextra', '-Werror',
            *sources, '-lm', '-o', str(library)], check=True)
        # AddressSanitizer needs libstdc++ at startup to intercept exceptions
        runtimes = [
            subprocess.run([compiler, f'-print-file-name={name}'], check=True, capture_output=True, text=True).stdout
            for name in ('libasan.so', 'libstdc++.so')]
        environment = {
            **os.environ,
            'LD_PRELOAD': ':'.join(map(str.strip, runtimes)),
            # Python and torch do not free all memory at exit
            'ASAN_OPTIONS': 'detect_leaks=0:abort_on_error=1',
            'UBSAN_OPTIONS': 'print_stacktrace=1:abort_on_error=1',
            'PYTHONPATH': f'{scratch}{os.pathsep}{ROOT}',
        }
        tests = [str(ROOT / 'tests' / 'inference' / name) for name in args.tests]
        # Do not capture the stderr of C: pytest would not print the report after an abort.
        command = ['-c', str(ROOT / 'pyproject.toml'), '--rootdir', str(ROOT), '-p', 'no:cacheprovider',
                   '--capture=sys', '-k', 'not without_a_compiler', *tests, *pytest_args]
        # Run in the temporary folder to import the copy of the package.
        program = (
            f'import timm_gated; assert timm_gated.__path__ == [{str(package)!r}], timm_gated.__path__\n'
            f'import sys, pytest; sys.exit(pytest.main({command!r}))')
        return subprocess.run([sys.executable, '-c', program], cwd=scratch, env=environment).returncode


if __name__ == '__main__':
    sys.exit(main())
