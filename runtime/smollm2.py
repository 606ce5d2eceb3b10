"""SmolLM2 from a conversation to text, over exported ncnn graphs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runtime.decoder import Attention, Choose, Decoder, Prompt, Token
from runtime.errors import InputError

History = Sequence[tuple[str, str]]  # (role, content) of the messages before the prompt


class Pipeline(Decoder):
    """The model over an exported folder."""

    KEYS = (
        *("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"),
        *("rms_norm_eps", "rope_theta"),
    )

    @staticmethod
    def attention(config: Mapping[str, Any]) -> Attention:
        """Keys and values are cached with the shared heads only."""
        width = config["hidden_size"] // config["num_attention_heads"]
        return Attention(config["num_hidden_layers"], config["num_key_value_heads"], width, width, width)

    def preprocess(self, pictures: Sequence[Any]) -> list[Any]:
        """The model takes no pictures. Raises InputError when there are some."""
        if pictures:
            raise InputError("smollm2 reads text only; leave --image out")
        return []

    def prompt(self, text: str, grids: Sequence[tuple[int, int]] = (), history: History = ()) -> Prompt:
        """Render the conversation and encode it."""
        messages = [{"role": role, "content": content} for role, content in (*history, ("user", text))]
        rendered = self.chat.render(messages)
        return Prompt(rendered, self.tokenizer.encode(rendered))

    def fuse(self, ids: Sequence[int], rows: None = None) -> Any:
        """Embedding rows (T, C)."""
        return self.table.embed(ids)

    def generate(
        self,
        pictures: Sequence[Any],
        text: str,
        count: int,
        history: History = (),
        choose: Choose | None = None,
    ) -> Iterator[Token]:
        """Up to `count` tokens; the last may be a stop id. Greedy unless `choose` is given."""
        self.preprocess(pictures)
        ids = self.prompt(text, (), history).ids
        self.check_context(len(ids) + count)
        yield from self.answer(self.prefill(self.fuse(ids)), ids, count, choose)
