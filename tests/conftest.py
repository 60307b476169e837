"""One thread a process: tests run beside the processes of Ray, where threads that spin cost more than they help."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import torch

torch.set_num_threads(1)
