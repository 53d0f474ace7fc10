import os

os.environ["SDL_VIDEODRIVER"] = "dummy"  # before pygame is imported by anything

import torch as th

th.set_num_threads(1)
