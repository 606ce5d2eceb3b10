"""The JSON files of an exported folder: what is missing is told by its file and key."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import EXPORT_AGAIN, InputError


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """One of the folder's JSON files. Raises InputError when it is missing or no object."""
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); {EXPORT_AGAIN}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, no object; {EXPORT_AGAIN}")
    return value


def read_config(folder: Path, keys: Sequence[str], context: int) -> dict[str, Any]:
    """config.json with all `keys` ("a" or "part.b"), its positions enough for the context."""
    config = read_json(folder, "config.json")
    missing = [key for key in (*keys, "max_position_embeddings") if not _has(config, key)]
    if missing:
        raise InputError(f"{folder / 'config.json'} has no {', '.join(missing)}; {EXPORT_AGAIN}")
    positions = config["max_position_embeddings"]
    if context > positions:
        raise InputError(f"the context is {context}, but the model has {positions} positions; pass a smaller --context")
    return config


def _has(config: Mapping[str, Any], key: str) -> bool:
    part, _, name = key.rpartition(".")
    return name in ((config.get(part) or {}) if part else config)
