"""Number of random trials in tests"""
import os

# `EXAMPLES_TIMES=5 pytest …` runs five times as many.
TIMES = int(os.environ.get('EXAMPLES_TIMES', '1'))
