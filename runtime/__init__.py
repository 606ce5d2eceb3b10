"""The port: numpy and ncnn only. Runs where neither torch nor transformers is installed."""

import os

# numpy's BLAS threads spin beside ncnn's: with two each, a token of SmolLM2 took 140 ms instead of 50.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
