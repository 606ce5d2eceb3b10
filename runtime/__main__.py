"""`python -m runtime MODEL`: picture and prompt in, text out. Needs numpy, ncnn, Pillow and jinja2 only."""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import Any

from runtime.conversation import Conversation
from runtime.decoder import CHUNK, CONTEXT, Token
from runtime.errors import InputError
from runtime.graphs import MODES, Manifest, NcnnRunner
from runtime.image import load_image
from runtime.memory import told, use_huge_pages
from runtime.sampler import Sampler, Sampling


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 answered, 1 nobody reads, 2 could not answer (told on standard error), 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        _answer(options)
    except BrokenPipeError:
        # as in `| head -1`; the interpreter would fail once more when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: out of memory; pass a smaller --context or --mode streaming", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _answer(options: argparse.Namespace) -> None:
    pictures = [load_image(path) for path in options.image]
    manifest = Manifest.read(options.model or _exported(options.name))
    if manifest.model != options.name:
        raise InputError(
            f"{options.model} holds {manifest.model}, but {options.name} was asked for; "
            f"run: python -m runtime {manifest.model} --model {options.model}"
        )
    make = _pipeline_of(manifest.model)
    runner = NcnnRunner(manifest, mode=options.mode, threads=options.threads, finite=True)
    pipeline = make(manifest, runner, context=options.context, chunk=options.chunk, memory=options.memory)
    print(f"memory: {told(pipeline.needs(pictures))}, {pipeline.budget}", file=sys.stderr)
    choose = Sampler(_sampling(options)).choose
    if options.chat:
        _chat(Conversation(pipeline, choose), options)
    else:
        _tell(pipeline.generate(pictures, options.prompt, options.new_tokens, choose=choose), options)


def _exported(model: str) -> Path:
    """The folder that was exported last, as `python -m parity export` noted it."""
    home = Path(os.environ.get("PARITY_HOME") or Path(__file__).parents[1] / ".parity")
    note = home / "exported" / f"{model}.txt"
    if not note.is_file():
        raise InputError(f"{model} was not exported here; run: python -m parity export {model}, or pass --model DIR")
    return Path(note.read_text(encoding="utf-8"))


def _chat(conversation: Conversation, options: argparse.Namespace) -> None:
    """One turn per line of standard input; --prompt is the first, an empty line or the end of input ends it."""
    text = options.prompt or _line()
    while text:
        _tell(conversation.say(text, options.new_tokens), options)
        text = _line()


def _line() -> str:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


def _tell(tokens: Iterator[Token], options: argparse.Namespace) -> None:
    ids, text = [], ""
    for token in tokens:
        ids.append(token.id)
        text += token.text
        if not (options.json or options.ids):
            print(token.text, end="", flush=True)
    print(_result(options, ids, text), flush=True)


def _sampling(options: argparse.Namespace) -> Sampling:
    return Sampling(**{field.name: getattr(options, field.name) for field in fields(Sampling)})


def _pipeline_of(model: str) -> Any:
    known = model.isidentifier() and importlib.util.find_spec(f"runtime.{model}") is not None
    make = getattr(importlib.import_module(f"runtime.{model}"), "Pipeline", None) if known else None
    if make is None:
        raise InputError(f"model {model} is unknown: runtime/{model}.py with its Pipeline is missing; write it")
    return make


def _result(options: argparse.Namespace, ids: list[int], text: str) -> str:
    if options.json:
        return json.dumps({"ids": ids, "text": text}, ensure_ascii=False)
    return " ".join(map(str, ids)) if options.ids else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime", description=__doc__)
    add = parser.add_argument
    add("name", metavar="MODEL", help="name of the model, such as youtu_vl")
    add("--model", type=Path, metavar="DIR", help="folder that `python -m parity export` wrote (default: the last)")
    add("--image", action="append", default=[], metavar="FILE", help="a picture; may be given several times")
    add("--prompt", default="", help="what to ask")
    add(
        "-n",
        "--new-tokens",
        type=_count,
        default=64,
        metavar="N",
        help="most tokens to generate (default 64)",
    )
    add("--context", type=_count, default=CONTEXT, metavar="N", help=f"most tokens of prompt and answer ({CONTEXT})")
    add("--chunk", type=_count, default=CHUNK, metavar="N", help=f"rows of a prompt or picture at once ({CHUNK})")
    add("--memory", type=_gigabytes, metavar="GB", help="most memory to take (default: what is free)")
    add("--mode", choices=MODES, default="resident", help="keep all graphs in memory, or one at a time")
    add("--threads", type=_count, default=2, metavar="N", help="threads of a graph (default 2)")
    add("--chat", action="store_true", help="keep a conversation: one turn per line of standard input")
    sampling = parser.add_argument_group("sampling", "greedy while the temperature is 0")
    for field in fields(Sampling):
        option = "--" + field.name.replace("_", "-")
        kind = type(field.default)
        sampling.add_argument(option, type=kind, default=field.default, metavar="X", help=f"default {field.default}")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--ids", action="store_true", help="print token ids instead of text")
    output.add_argument("--json", action="store_true", help="print one JSON object with ids and text")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number, 1 or more")
    return int(text)


def _gigabytes(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < inf:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of gigabytes, such as 8")
    return int(size * 1e9)


def _use_utf8(stream: Any) -> None:
    # a pipe on Windows would otherwise take the system's code page
    stream.reconfigure(encoding="utf-8")


if __name__ == "__main__":
    if _parser().parse_args().mode == "resident":  # streamed, the caches' untouched rows would only cost memory
        use_huge_pages()
    _use_utf8(sys.stdout)
    sys.exit(main())
