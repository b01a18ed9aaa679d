"""How much the tests that draw or try at random do"""
import os

# `EXAMPLES_TIMES=5 pytest …` does five times as much.
TIMES = int(os.environ.get('EXAMPLES_TIMES', '1'))
