"""A conversation that keeps its caches: of every turn only the tokens that are new go through the graphs."""

from collections.abc import Iterator
from typing import Any

from runtime.decoder import Choose, Token


class Conversation:
    """Messages so far over one text pipeline, and the ids that stand in its caches."""

    def __init__(self, pipeline: Any, choose: Choose | None = None) -> None:
        self.pipeline, self.choose = pipeline, choose
        self.history: list[tuple[str, str]] = []
        self.cached: list[int] = []

    def say(self, text: str, count: int) -> Iterator[Token]:
        """The answer to `text`, up to `count` tokens. Raises InputError when the context does not hold it."""
        ids = self.pipeline.prompt(text, (), self.history).ids
        self.pipeline.check_context(len(ids) + count)
        hidden = self._read(ids)
        answer = ""
        for token in self.pipeline.answer(hidden, ids, count, self.choose):
            answer += token.text
            yield token
            self.cached = (ids := [*ids, token.id])[: self.pipeline.caches[0].length]
        self.history += [("user", text), ("assistant", answer)]

    def _read(self, ids: list[int]) -> Any:
        """Bring the caches to `ids`: what they share with them stays, the rest is dropped and read."""
        shared = 0
        for ours, theirs in zip(self.cached, ids[:-1], strict=False):  # one row at least is read, for its logits
            if ours != theirs:
                break
            shared += 1
        embeds = self.pipeline.table.embed(ids[shared:])
        self.cached = ids
        if not shared:
            return self.pipeline.prefill(embeds)
        for cache in self.pipeline.caches:
            cache.length = shared
        return self.pipeline.extend(embeds)
