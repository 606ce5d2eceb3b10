"""The fp32 truth for SmolLM2: every graph's function, and the whole model from a conversation to greedy ids."""

from collections.abc import Sequence

from references.checkpoint import Checkpoint
from references.reference import Prompt, TextReference
from references.smollm2.config import sizes
from references.smollm2.graphs import MODEL, graphs


class Reference(TextReference):
    """SmolLM2 in fp32 over a checkpoint folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        found = sizes(checkpoint.config)
        super().__init__(MODEL, checkpoint, found, found, graphs(found))

    def prompt(self, text: str, history: Sequence[tuple[str, str]] = ()) -> Prompt:
        """Chat template over the messages before and the user's text, then ids."""
        turns = [*history, ("user", text)]
        rendered = self.render([{"role": role, "content": content} for role, content in turns])
        return Prompt(rendered, self.encode(rendered))
