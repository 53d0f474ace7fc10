import os

os.environ["SDL_VIDEODRIVER"] = "dummy"  # before pygame is imported by anything
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as in tests/conftest.py

import torch as th

th.set_num_threads(1)
