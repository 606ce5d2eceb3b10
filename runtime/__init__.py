"""The port: numpy and ncnn only. Runs where neither torch nor transformers is installed."""

import os

# ncnn's threads spin for 15 ms after a graph and would take a core from the head. Read when ncnn is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
