"""Reference layer -> rewritten layer -> pnnx -> ncnn graph. One file per model."""
