"""Every kind of mistake that a hint may name, and the hint."""

from dataclasses import dataclass

KINDS = (
    "shape",  # other axes or lengths
    "another tensor",  # of the same shape: told by whoever holds them all, not here
    "non-finite",  # NaN or Inf
    "sign",
    "scale",
    "offset",
    "affine",  # scale and offset
    "rounding",  # values of fp16 or bf16
    "steps",  # all differences are multiples of one step
    "inverse order",  # of indices: the inverse permutation
    "axes",  # transposed or permuted
    "head order",  # whole heads permuted (GQA)
    "row shift",
    "row order",
    "halves",  # swapped halves of the channels, or of each block of them
    "interleave",  # (n, m) channels read as (m, n)
    "channel order",  # any other permutation of channels
    "value order",  # the same values in an order without a name
    "channel scale",  # one factor per channel (norm weight)
    "channel offset",  # one summand per channel (bias)
    "channel affine",
    "row scale",  # one factor per row
    "norm epsilon",
    "zero",  # rows, heads or channels that are zero
    "rotary",  # pairs of channels are turned by a wrong angle
    "growth",  # with the row index
    "image span",
    "outside image",
    "all but last row",
    "all but first row",
    "first rows",
    "last rows",
    "border rows",
    "row block",
    "scattered rows",
    "heads",
    "channel block",
    "periodic channels",
    "scattered channels",
    "few values",
    "activation",  # the error is a function of the value
    "small everywhere",
)


@dataclass(frozen=True)
class Hint:
    """A kind of mistake, one of KINDS, and what was seen, in one sentence with numbers."""

    kind: str
    evidence: str
