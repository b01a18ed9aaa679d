"""Run the tests of the native kernels under AddressSanitizer and UndefinedBehaviorSanitizer

Builds the kernels with both into a copy of the package in a temporary folder, and runs the tests of programs, of whole
networks and of their inputs on it, with small blocks so that most maps take several. Any report of a sanitizer ends the
process that runs the tests. Other arguments are passed on to pytest; EXAMPLES_TIMES=10 in the environment draws ten
times as many programs and networks.

    python tools/sanitize_kernels.py --tests test_kernels.py -x
"""
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from _options import make_parser

ROOT = Path(__file__).resolve().parents[1]
TESTS = ('test_kernels.py', 'test_accelerate.py', 'test_accelerate_inputs.py', 'test_accelerate_random.py')


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument('--tests', nargs='+', default=TESTS, choices=TESTS, metavar='FILE', help=', '.join(TESTS))
    args, of_pytest = parser.parse_known_args()
    compiler = os.environ.get('CC', 'gcc')
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / 'timm_gated'
        shutil.copytree(ROOT / 'timm_gated', package, ignore=shutil.ignore_patterns('*.so', '__pycache__'))
        library = package / f'_native{sysconfig.get_config_var("EXT_SUFFIX")}'
        sources = map(str, sorted((package / 'csrc').glob('*.c')))
        subprocess.run([
            compiler, '-std=gnu11', '-O0', '-g', '-fno-omit-frame-pointer',
            '-fsanitize=address,undefined,float-divide-by-zero,float-cast-overflow', '-fno-sanitize-recover=all',
            '-DWINOGRAD_FLOATS=4096', '-fopenmp', '-shared', '-fPIC',
            '-Wall', '-Wextra', '-Werror',
            f'-I{sysconfig.get_path("include")}', *sources, '-o', str(library)], check=True)
        # (with the C++ library, whose exceptions, torch's here, AddressSanitizer looks for at the start)
        runtimes = [
            subprocess.run([compiler, f'-print-file-name={name}'], check=True, capture_output=True, text=True).stdout
            for name in ('libasan.so', 'libstdc++.so')]
        environment = {
            **os.environ,
            'LD_PRELOAD': ':'.join(map(str.strip, runtimes)),
            # Python and torch keep memory until the end on purpose
            'ASAN_OPTIONS': 'detect_leaks=0:abort_on_error=1',
            'UBSAN_OPTIONS': 'print_stacktrace=1:abort_on_error=1',
            'PYTHONPATH': f'{scratch}{os.pathsep}{ROOT}',
        }
        tests = [str(ROOT / 'tests' / 'inference' / name) for name in args.tests]
        # What C writes is not captured: pytest would not come to show the report that ended it.
        command = ['-c', str(ROOT / 'pyproject.toml'), '--rootdir', str(ROOT), '-p', 'no:cacheprovider',
                   '--capture=sys', '-k', 'not without_a_compiler', *tests, *of_pytest]
        # From the temporary folder, so that the copy of the package is the one imported. Make sure of it.
        program = (
            f'import timm_gated._native as m; assert m.__file__ == {str(library)!r}, m.__file__\n'
            f'import sys, pytest; sys.exit(pytest.main({command!r}))')
        return subprocess.run([sys.executable, '-c', program], cwd=scratch, env=environment).returncode


if __name__ == '__main__':
    sys.exit(main())
