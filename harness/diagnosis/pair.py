"""Both tensors as one shape, and the error along each of its axes: what the detectors look at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from harness.diagnosis.kinds import Hint
from harness.diagnosis.numbers import SAMPLE, Floats, Mask, Tensor, rms
from harness.diagnosis.words import listed

NOISE = 1e-6  # relative L2 that no finding is based on; fp32 noise is 1e-7..1e-6
FLOORS = 8.0  # as many noise floors are noise
UNDONE = 1e-4  # of the rms: what may be left when a mistake is undone
FAR = 20.0  # undoing must make the error this much smaller


@dataclass(frozen=True)
class Axis:
    """The error along one axis: of rows, heads or channels, each flattened."""

    name: str
    actual: Floats  # (n, k)
    expected: Floats  # (n, k)
    error: Floats  # (n,) over its own size, or the median size where that is larger
    absolute: Floats  # (n,) over the median size
    noise: float

    @cached_property
    def wrong(self) -> Mask:
        """Which differ; a ten-thousandth of a large error counts as equal."""
        return self.error > max(self.noise, 1e-4 * min(1.0, float(self.error.max())))

    @property
    def localised(self) -> bool:
        """Whether some are equal, and a gap parts them from those that are not."""
        equal = 1 - float(self.wrong.mean())
        if equal in (0.0, 1.0) or (self.actual.shape[1] < 4 and equal < 0.05):  # single values are equal by chance
            return False
        both = (self.error, self.absolute)
        return all(error[self.wrong].min() > 5 * error[~self.wrong].max() for error in both)

    def named(self, mask: Mask) -> str:
        """`rows 3-11 of 20`."""
        plural = "s" if mask.sum() > 1 else ""
        return f"{self.name}{plural} {listed(np.flatnonzero(mask))} of {len(mask)}"


@dataclass(frozen=True)
class Pair:
    """Both tensors as (heads, T, C), divided by one power of two so that no square overflows."""

    actual: Floats
    expected: Floats
    unit: float  # that power
    shape: tuple[int, ...]
    floor: float
    spans: Mapping[str, slice] = field(default_factory=dict)
    side: int = 1  # heads side by side in the last axis

    @cached_property
    def error(self) -> Floats:
        """Actual minus expected."""
        return self.actual - self.expected

    @cached_property
    def each(self) -> tuple[float, float]:
        """The rms of actual and of expected."""
        return rms(self.actual), rms(self.expected)

    @cached_property
    def size(self) -> float:
        """The smaller rms of the two, so that a tensor near zero does not look explained by a scale of zero."""
        return min(self.each) or max(self.each) or 1.0

    @cached_property
    def before(self) -> float:
        """The relative L2 of the error, before anything is undone."""
        return rms(self.error) / self.size

    @property
    def noise(self) -> float:
        """Relative L2 up to which nothing differs."""
        return max(FLOORS * self.floor, NOISE)

    def left(self, residual: Floats) -> float | None:
        """The relative residual when it shows that the mistake is undone."""
        left = rms(residual) / self.size
        return left if left <= min(max(FLOORS * self.floor, UNDONE), self.before / FAR) else None

    @cached_property
    def same_energy(self) -> bool:
        """No permutation changes it."""
        ours, theirs = self.each
        return abs(ours - theirs) <= 1e-3 * theirs

    @cached_property
    def rows(self) -> Axis:
        """The error by row, all heads together."""
        T = self.actual.shape[1]
        return self._axis("row", T, lambda x: x.transpose(1, 0, 2).reshape(T, -1), (0, 2))

    @cached_property
    def channels(self) -> Axis:
        """The error by channel, all heads together; by value in a tensor of rank 1."""
        C = self.actual.shape[2]
        return self._axis("channel" if len(self.shape) > 1 else "value", C, lambda x: x.reshape(-1, C).T, (0, 1))

    @cached_property
    def heads(self) -> Axis:
        """Heads on the leading axis, or side by side in the last one."""
        if self.side == 1:
            H = self.actual.shape[0]
            return self._axis("head", H, lambda x: x.reshape(H, -1), (1, 2))
        return self.apart.heads

    @cached_property
    def apart(self) -> "Pair":
        """Heads that stand side by side, moved to the leading axis: (1, T, H * d) -> (H, T, d)."""
        _, T, C = self.actual.shape
        if self.side == 1:
            return self
        a, e = (x.reshape(T, self.side, C // self.side).transpose(1, 0, 2) for x in (self.actual, self.expected))
        return Pair(a, e, self.unit, a.shape, self.floor, self.spans)

    @cached_property
    def part(self) -> "Pair":
        """Some rows, evenly apart: what holds for the whole holds for them."""
        step = max(1, self.actual.shape[1] * self.actual.shape[2] // SAMPLE)
        a, e = self.actual[:, ::step], self.expected[:, ::step]
        return Pair(a, e, self.unit, a.shape, self.floor) if step > 1 else self

    @cached_property
    def squares(self) -> tuple[Floats, Floats]:
        """Of the error and of expected."""
        return np.square(self.error), np.square(self.expected)

    def _axis(self, name: str, count: int, view: Callable[[Floats], Floats], over: tuple[int, int]) -> Axis:
        error, size = (np.sqrt(square.mean(axis=over)).reshape(count) for square in self.squares)
        middle = float(np.median(size)) or self.size
        own = error / np.maximum(size, middle)
        return Axis(name, view(self.actual), view(self.expected), own, error / middle, self.noise)


Detector = Callable[[Pair], Hint | None]


def paired(actual: Tensor, expected: Tensor, floor: float, spans: Mapping[str, slice], heads: int) -> Pair:
    """Finite where both are; what is not finite is the same on both sides by now."""
    good = np.isfinite(expected)
    a, e = (np.where(good, side, 0).astype(np.float64) for side in (actual, expected))
    largest = max(float(np.abs(a).max()), float(np.abs(e).max()))
    unit = 2.0 ** float(np.clip(np.frexp(largest)[1], -1000, 1000))
    whole = (1,) * max(0, 2 - a.ndim) + a.shape
    form = (int(np.prod(whole[:-2])), *whole[-2:])
    side = heads if a.ndim <= 2 and heads > 1 and form[-1] % heads == 0 else 1
    return Pair(a.reshape(form) / unit, e.reshape(form) / unit, unit, a.shape, floor, spans, side)


def widespread(*axes: Axis) -> bool:
    """Whether most are wrong; few that are wrong are a place."""
    return all(axis.wrong.mean() > 0.5 for axis in axes)
