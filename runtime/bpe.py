"""Byte-level BPE: a piece of text to ids by merging pairs of tokens, lowest rank first."""

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

CACHED_PIECES = 1 << 16
CACHED_LENGTH = 64  # characters; longer pieces seldom come again


def _byte_symbols() -> list[str]:
    """The character that stands for each byte: itself if it prints, else the next free one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {byte: 0x100 + n for n, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]


SYMBOLS = _byte_symbols()
BYTES = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}


def token_bytes(token: str) -> bytes:
    """What a token decodes to: its symbols' bytes, or its UTF-8 if a character is not a byte's symbol."""
    if all(char in BYTES for char in token):
        return bytes(BYTES[char] for char in token)
    return token.encode()


class Bpe:
    """Byte-pair merging of one piece of text.

    The pair of lowest rank is merged first, the leftmost of equals. `ignore_merges`: a piece that is itself
    in the vocabulary is that id, whatever the merges say.
    """

    def __init__(self, vocab: dict[str, int], merges: Sequence[tuple[str, str]], *, ignore_merges: bool) -> None:
        self.vocab = vocab
        self.ignore_merges = ignore_merges
        self.merges = {  # (left, right) -> (rank, merged)
            (vocab[left], vocab[right]): (rank, vocab[left + right]) for rank, (left, right) in enumerate(merges)
        }
        self._cache: dict[str, list[int]] = {}

    def ids(self, piece: str) -> list[int]:
        """Ids of a piece. Bytes whose symbol the vocabulary lacks are dropped, as the library does."""
        known = self._cache.get(piece)
        if known is not None:
            return known
        ids = self._encode(piece)
        if len(piece) <= CACHED_LENGTH:
            if len(self._cache) >= CACHED_PIECES:
                self._cache.clear()
            self._cache[piece] = ids
        return ids

    def _encode(self, piece: str) -> list[int]:
        symbols = [SYMBOLS[byte] for byte in piece.encode()]
        whole = self.vocab.get("".join(symbols)) if self.ignore_merges else None
        if whole is not None:
            return [whole]
        return self._merge([self.vocab[symbol] for symbol in symbols if symbol in self.vocab])

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge all that can be. `ids` is a linked list; an id merged into its left neighbour becomes -1."""
        size = len(ids)
        before, after = list(range(-1, size - 1)), list(range(1, size + 1))

        def candidates(start: int) -> Iterator[tuple[int, int, int, int, int]]:
            if start >= 0 and after[start] < size:
                left, right = ids[start], ids[after[start]]
                if found := self.merges.get((left, right)):
                    yield found[0], start, left, right, found[1]

        heap = [candidate for start in range(size) for candidate in candidates(start)]
        heapify(heap)
        while heap:
            _, start, left, right, merged = heappop(heap)
            gone = after[start]
            if ids[start] != left or gone >= size or ids[gone] != right:
                continue  # a merge since then has used one of the two
            ids[start], ids[gone] = merged, -1
            after[start] = after[gone]
            if after[start] < size:
                before[after[start]] = start
            for neighbour in (before[start], start):
                for candidate in candidates(neighbour):
                    heappush(heap, candidate)
        return [token for token in ids if token >= 0]
