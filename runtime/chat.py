"""The checkpoint's own chat template, rendered by jinja2 with the settings that transformers uses."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import EXPORT_AGAIN, InputError

# What a template's own expressions raise, beside jinja2's errors.
_RAISED = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ChatTemplate:
    """Renders messages to the prompt text."""

    def __init__(self, source: str, where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        self._where = where
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"the chat template of {where} does not parse: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate":
        """Find the template where checkpoints keep it; raises InputError when no file holds one."""
        path = folder / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), str(path))
        for name in ("chat_template.json", "tokenizer_config.json"):
            path = folder / name
            source = _stated(path) if path.is_file() else None
            if source:
                return cls(source, str(path))
        raise InputError(
            f"{folder} has no chat template; copy chat_template.json into the checkpoint and export it again"
        )

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt text, up to where the assistant's answer begins."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except _RAISED as error:
            raise InputError(
                f"the chat template of {self._where} refuses the messages: {error}; change what is asked"
            ) from error


def _stated(path: Path) -> str | None:
    try:
        source = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is no JSON object ({error}); {EXPORT_AGAIN}") from error
    if source is not None and not isinstance(source, str):
        raise InputError(
            f"{path} states a chat_template of type {type(source).__name__}, but should state a text; "
            f"keep the one that is meant and {EXPORT_AGAIN}"
        )
    return source


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which a prompt must not
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
