"""What the property tests draw from, and the settings that make them repeat."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from harness.metrics import Tensor

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=60)

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


@st.composite
def tensor_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """An actual and an expected tensor of one shape (1-3 axes), near each other, some rows zero."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    expected = random.standard_normal(shape) * 10.0 ** draw(st.integers(-20, 20)) + draw(st.integers(-3, 3))
    expected = expected * (random.random((*shape[:-1], 1)) < 0.8)
    actual = expected * draw(st.floats(0.5, 2)) + random.standard_normal(shape) * draw(st.floats(0, 1))
    return actual.astype(np.float32), expected.astype(np.float32)
