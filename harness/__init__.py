"""What every part knows: tensors, ids, files, verdicts. No model, no torch, no ncnn."""
