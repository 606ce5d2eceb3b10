"""The tied head over a float16 table in memory: ncnn's InnerProduct keeps the rows as they are stored.

They are widened in the processor's registers, and the arithmetic is float32's. numpy widens ten times as slowly as the
memory could be read.
But: where ncnn has kernels with float16 inputs, as on ARM, it would round the hidden state: `exact` tells.
"""

from typing import Any

import ncnn
import numpy as np
from numpy.typing import NDArray

from runtime.graphs import checked, set_fp32_options
from runtime.mat import from_mat, to_mat
from runtime.weights import fill

_PART_BYTES = 1 << 26  # of a net; while one is loaded, its rows stand in memory three times as large
_HALF = np.uint32(0x01306B47).tobytes()  # in front of weights that are stored in float16
_PROBED_ROWS = 64


class HalfHead:
    """Logits of a float16 table (vocab, width) without a wider copy of it."""

    def __init__(self, rows: NDArray[np.float16], *, threads: int) -> None:
        count = max(1, _PART_BYTES // (2 * rows.shape[1]))
        self._nets = [_net(rows[first : first + count], threads) for first in range(0, len(rows), count)]
        probe = np.linspace(-1, 1, rows.shape[1], dtype=np.float32)
        expected = rows[: min(count, _PROBED_ROWS)].astype(np.float32) @ probe
        off = np.abs(_run(self._nets[0], probe)[:_PROBED_ROWS] - expected).max()
        self.exact = bool(off <= 1e-5 * np.abs(expected).max())

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """(width,) -> (vocab,)."""
        return np.concatenate([_run(net, hidden) for net in self._nets])


def _net(rows: NDArray[np.float16], threads: int) -> ncnn.Net:
    count, width = rows.shape
    net = ncnn.Net()
    set_fp32_options(net.opt, threads)
    net.opt.use_fp16_storage = True  # of the weights alone
    param = f"7767517\n2 2\nInput in0 0 1 in0\nInnerProduct head 1 1 in0 out0 0={count} 1=0 2={count * width}\n"
    checked(net.load_param_mem(param), "the head: ncnn cannot load its param")
    checked(net.load_model(_Rows(rows)), "the head: ncnn cannot load its rows")
    return net


def _run(net: ncnn.Net, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    extractor = net.create_extractor()
    mat = to_mat(hidden, rank=1, where="the head's input")  # named: the extractor does not keep it alive
    checked(extractor.input("in0", mat), "the head: ncnn refused its input")
    code, out = extractor.extract("out0")
    checked(code, "the head: ncnn could not compute its output")
    return from_mat(out, rank=1, where="the head's output")


class _Rows(ncnn.DataReader):
    """Rows as ncnn reads weights: the mark of float16 in front, padding to four bytes behind."""

    def __init__(self, rows: NDArray[np.float16]) -> None:
        super().__init__()
        padding = b"\0" * (-rows.nbytes % 4)
        self._left: list[Any] = [memoryview(_HALF), rows.data.cast("B"), memoryview(padding)]

    def read(self, buffer: object, size: int) -> int:
        """Fill ncnn's buffer."""
        target, done = fill(buffer, size), 0
        while done < size and self._left:
            piece = self._left[0][: size - done]
            target[done : done + len(piece)] = piece
            done += len(piece)
            self._left[0] = self._left[0][len(piece) :]
            if not self._left[0]:
                self._left.pop(0)
        return done
