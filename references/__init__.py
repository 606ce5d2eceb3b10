"""fp32 torch references: the only truth. One folder per model; adding a model is one more name in MODELS."""

MODELS = ("youtu_vl", "smollm2")
# They decide what a reference computes.
PACKAGES = ("torch", "transformers", "tokenizers", "pillow", "numpy")
