"""Peak memory is in bytes and keeps the peak."""

import numpy as np

from harness.resources import peak_memory_bytes

MB = 1 << 20


def test_peak_remembers_what_was_freed() -> None:
    before = peak_memory_bytes()
    block = np.ones(before + 64 * MB, np.uint8)
    assert block[-1] == 1
    del block
    after = peak_memory_bytes()
    assert after >= before + 60 * MB
    assert 10 * MB < before < after < 64 * 1024 * MB
