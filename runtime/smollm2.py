"""SmolLM2 from a conversation to text, over exported ncnn graphs."""

from collections.abc import Iterator, Sequence
from typing import Any

from runtime.config import read_config
from runtime.decoder import CHUNK, CacheShape, Choose, Decoder, Prompt, Token
from runtime.errors import InputError
from runtime.graphs import Manifest, Runner

History = Sequence[tuple[str, str]]  # (role, content) of the messages before the prompt

# The keys of config.json that are read here.
KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta")


class Pipeline(Decoder):
    """The model over an exported folder. Keys and values are cached with the shared heads only."""

    def __init__(
        self,
        manifest: Manifest,
        runner: Runner,
        *,
        context: int = 4096,
        chunk: int = CHUNK,
        memory: int | None = None,
    ) -> None:
        config = read_config(manifest.folder, KEYS, context)
        width = config["hidden_size"] // config["num_attention_heads"]
        shape = CacheShape(config["num_hidden_layers"], config["num_key_value_heads"], width, width)
        super().__init__(
            manifest, runner, context=context, chunk=chunk, memory=memory, config=config, shape=shape, rotary_dim=width
        )

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
