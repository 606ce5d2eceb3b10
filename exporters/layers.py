"""Layers rewritten so that pnnx converts them to plain ncnn layers: nothing fused by guess, no length baked.

Rotation is spelt out, because pnnx's guess at a fused RotaryEmbed may read axes differently; a rewrite that wants a
fused layer calls it by its torch name, and its structure's census asks for it. Lengths are -1
in a reshape; `repeat` stands for `expand`, which leaves an expression that ncnn cannot load.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm over the last axis: x * rsqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> same shape."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def heads(x: Tensor, count: int, width: int) -> Tensor:
    """(1, T, count * width) -> (1, count, T, width)."""
    return x.reshape(1, -1, count, width).transpose(1, 2)


def rotate_half(x: Tensor) -> Tensor:
    """[-second half | first half] of the last axis; pnnx makes a RotaryEmbed of `x * cos + rotate_half(x) * sin`."""
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def rotate_half_matrix(width: int) -> Tensor:
    """R with x @ R = rotate_half(x) = [-second half | first half]."""
    half = width // 2
    matrix = torch.zeros(width, width)
    for i in range(half):
        matrix[half + i, i] = -1
        matrix[i, half + i] = 1
    return matrix


def deinterleave_matrix(width: int) -> Tensor:
    """P with x @ P = [even elements | odd elements]."""
    half = width // 2
    matrix = torch.zeros(width, width)
    for i in range(half):
        matrix[2 * i, i] = 1
        matrix[2 * i + 1, half + i] = 1
    return matrix
