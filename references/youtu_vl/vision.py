"""Youtu-VL's vision tower and patch merger in plain torch: SigLIP-2 blocks, windows, axial rotary positions.

Follows the remote code of Youtu-VL-4B-Instruct (modeling_siglip2.py) as public ports describe it; under
`Vision` the state-dict keys are the checkpoint's names.
But: no learned position embedding and no pooling head (the model uses neither), no dropout, no batch: several
pictures are rows of one sequence, kept apart by the masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from references.kinds import Function, Kind, Tensors
from references.youtu_vl.config import VisionSizes
from references.youtu_vl.weights import VISION, VISION_LAYER

Grids = Sequence[tuple[int, int]]  # (rows, columns) of patches of each picture, both even

THETA = 10000.0
MASKED = -1e9  # finite, and exp() of it is exactly 0


@dataclass(frozen=True)
class Tables:
    """What the layers need besides weights; all but `inverse` in or into window order."""

    order: torch.Tensor  # (N,) gather into window order
    inverse: torch.Tensor  # (N,) gather back into merge-block order
    cos: torch.Tensor  # (N, head_dim), window order
    sin: torch.Tensor  # (N, head_dim), window order
    window_mask: torch.Tensor  # (N, N)
    full_mask: torch.Tensor  # (N, N)

    def to(self, dtype: torch.dtype) -> "Tables":
        """Floating tables cast. They are made in float32, so that float64 measures the layers only."""
        cast = {field.name: getattr(self, field.name) for field in fields(self)}
        return Tables(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in cast.items()})


def window_index(grids: Grids, *, window_cells: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merged cells in window order (cells,), and the windows' bounds in patches (windows + 1,)."""
    index, bounds, first = [], [0], 0
    for height, width in grids:
        h, w = height // merge, width // merge
        cells = torch.arange(first, first + h * w).view(h, w)
        cells = F.pad(cells, (0, -w % window_cells, 0, -h % window_cells), value=-1)
        windows = cells.unfold(0, window_cells, window_cells).unfold(1, window_cells, window_cells)
        for window in windows.flatten(0, 1):  # (window_cells, window_cells)
            members = window[window >= 0]
            index.append(members)
            bounds.append(bounds[-1] + len(members) * merge**2)
        first += h * w
    return torch.cat(index), torch.tensor(bounds, dtype=torch.int32)


def rotary_angles(grids: Grids, *, head_dim: int, merge: int, theta: float = THETA) -> torch.Tensor:
    """Rotary angles in merge-block order, the row's before the column's, said twice: (N, head_dim)."""
    half = head_dim // 2
    inv_freq = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))  # (head_dim / 4,)
    angles = []
    for height, width in grids:
        row = torch.arange(height, dtype=torch.float32)[:, None].expand(height, width)
        column = torch.arange(width, dtype=torch.float32)[None, :].expand(height, width)
        place = torch.stack([row, column], dim=-1)  # (height, width, 2)
        place = place.reshape(height // merge, merge, width // merge, merge, 2).transpose(1, 2)
        angles.append((place.reshape(-1, 2, 1) * inv_freq).flatten(1))  # (n, head_dim / 2)
    return torch.cat(angles).repeat(1, 2)  # (N, head_dim)


def block_mask(bounds: torch.Tensor) -> torch.Tensor:
    """Additive mask, 0 where query and key are in one block: (blocks + 1,) -> (N, N)."""
    block = torch.bucketize(torch.arange(int(bounds[-1])), bounds, right=True)  # (N,)
    return torch.where(block[:, None] == block[None, :], 0.0, MASKED)  # (N, N)


def tables(grids: Grids, sizes: VisionSizes) -> Tables:
    """Order, rotary tables and masks of the pictures' patches."""
    merge = sizes.spatial_merge_size
    cells, windows = window_index(grids, window_cells=sizes.window_cells, merge=merge)
    pictures = torch.tensor([0] + [height * width for height, width in grids]).cumsum(0)
    order = torch.arange(int(pictures[-1])).view(-1, merge**2)[cells].flatten()  # (N,)
    angles = rotary_angles(grids, head_dim=sizes.head_dim, merge=merge)[order]  # (N, head_dim)
    return Tables(
        order=order,
        inverse=order.argsort(),
        cos=angles.cos(),
        sin=angles.sin(),
        window_mask=block_mask(windows),
        full_mask=block_mask(pictures),
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head: (1, H, N, D) -> (1, H, N, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Multi-head attention with rotary positions and an additive mask."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        C = sizes.hidden_size
        self.heads = sizes.num_attention_heads
        self.q_proj = nn.Linear(C, C)
        self.k_proj = nn.Linear(C, C)
        self.v_proj = nn.Linear(C, C)
        self.out_proj = nn.Linear(C, C)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(1, N, C) -> (1, N, C)."""
        q, k, v = (self.split(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))  # (1, H, N, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask  # (1, H, N, N)
        mixed = scores.softmax(dim=-1) @ v  # (1, H, N, D)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))  # (1, N, C)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(1, N, C) -> (1, H, N, D)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers around the tanh approximation of GELU."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.fc1 = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.fc2 = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, N, C) -> (1, N, C)."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class EncoderLayer(nn.Module):
    """Pre-norm block."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.self_attn = Attention(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.mlp = MLP(sizes)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(1, N, C), tables (N, D) and mask (N, N) in the same order of rows -> (1, N, C)."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden), cos, sin, mask)
        return hidden + self.mlp(self.layer_norm2(hidden))


class Embeddings(nn.Module):
    """Linear patch embedding."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.patch_embedding = nn.Linear(sizes.patch_dim, sizes.hidden_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, patch_dim) -> (1, N, C)."""
        return self.patch_embedding(pixel_values)[None]


class Encoder(nn.Module):
    """The stack of blocks."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.full = frozenset(sizes.fullatt_block_indexes)
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(sizes.num_hidden_layers))

    def forward(self, hidden: torch.Tensor, tables: Tables) -> torch.Tensor:
        """(1, N, C) -> (1, N, C), both in window order."""
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, tables.cos, tables.sin, self.mask(number, tables))
        return hidden

    def mask(self, number: int, tables: Tables) -> torch.Tensor:
        """Mask of one layer: a few see the whole picture, the others their window. (N, N)."""
        return tables.full_mask if number in self.full else tables.window_mask


class VisionTower(nn.Module):
    """The checkpoint's `siglip2.vision_model`."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.sizes = sizes
        self.embeddings = Embeddings(sizes)
        self.encoder = Encoder(sizes)
        self.post_layernorm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)

    def forward(self, pixel_values: torch.Tensor, grids: Grids) -> torch.Tensor:
        """(N, patch_dim) -> (1, N, C), both in merge-block order."""
        hidden = self.embeddings(pixel_values)  # (1, N, C)
        t = tables(grids, self.sizes).to(hidden.dtype)
        hidden = self.encoder(hidden[:, t.order], t)[:, t.inverse]
        return self.post_layernorm(hidden)


class MergerNorm(nn.Module):
    """RMSNorm of the merger, weight only."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, C) -> (…, C)."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Merger(nn.Module):
    """Four patches of a merged cell -> one row of the decoder's width."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.width = sizes.hidden_size * sizes.spatial_merge_size**2
        self.ln_q = MergerNorm(sizes.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, sizes.out_hidden_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, N, C) in merge-block order -> (1, N / 4, out)."""
        return self.mlp(self.ln_q(x).reshape(1, -1, self.width))


class Siglip2(nn.Module):
    """The level `siglip2` of the checkpoint's names."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.vision_model = VisionTower(sizes)


class Vision(nn.Module):
    """Tower and merger under the checkpoint's names, whole or stage by stage.

    By stages: `embed`, gather `tables().order`, each of `layers` with its `mask`, gather `inverse`, `tail`.
    """

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.sizes = sizes
        self.siglip2 = Siglip2(sizes)
        self.merger = Merger(sizes)

    def forward(self, pixel_values: torch.Tensor, grids: Grids) -> torch.Tensor:
        """(N, patch_dim) in merge-block order -> (1, N / 4, out)."""
        return self.merger(self.siglip2.vision_model(pixel_values, grids))

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, callable as layer(hidden, cos, sin, mask)."""
        return self.siglip2.vision_model.encoder.layers

    def tables(self, grids: Grids) -> Tables:
        """Order, rotary tables and masks of these pictures, in float32."""
        return tables(grids, self.sizes)

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, patch_dim) -> (1, N, C), in merge-block order."""
        return self.siglip2.vision_model.embeddings(pixel_values)

    def mask(self, number: int, tables: Tables) -> torch.Tensor:
        """Mask of layer `number`: (N, N)."""
        return self.siglip2.vision_model.encoder.mask(number, tables)

    def tail(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, N, C), back in merge-block order -> (1, N / 4, out)."""
        return self.merger(self.siglip2.vision_model.post_layernorm(hidden))


class Tail(nn.Module):
    """The graph `vision.tail`: the tower's last norm and the merger."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.post_layernorm = nn.LayerNorm(sizes.hidden_size, eps=sizes.layer_norm_eps)
        self.merger = Merger(sizes)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, N, C) in merge-block order -> (1, N / 4, out)."""
        return self.merger(self.post_layernorm(hidden))


def _embed(module: nn.Module, pixel_values: torch.Tensor) -> Tensors:
    return {"hidden": module(pixel_values)[0]}


def _layer(
    module: nn.Module, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
) -> Tensors:
    return {"hidden": module(hidden[None], cos[0], sin[0], mask[0])[0]}


def _tail(module: nn.Module, hidden: torch.Tensor) -> Tensors:
    return {"rows": module(hidden[None])[0]}


KINDS = {
    "vision.embed": Kind(lambda s, _: Embeddings(s.vision), {"": VISION + "embeddings."}),
    "vision.layer": Kind(lambda s, _: EncoderLayer(s.vision), {"": VISION_LAYER}),
    "vision.tail": Kind(
        lambda s, _: Tail(s.vision), {"post_layernorm.": VISION + "post_layernorm.", "merger.": "merger."}
    ),
}
FUNCTIONS: dict[str, tuple[str, Function]] = {
    "vision.embed": ("vision.embed", _embed),
    "vision.layer": ("vision.layer", _layer),
    "vision.tail": ("vision.tail", _tail),
}
