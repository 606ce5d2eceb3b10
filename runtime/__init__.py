"""The port: numpy and ncnn only. Runs where neither torch nor transformers is installed."""
