"""What every part of the report needs: the form of its content, and words for what could not be had, the port."""

import importlib
from collections.abc import Callable
from typing import Any

from harness.errors import UnjudgedError
from parity.workspace import Workspace
from runtime.errors import InputError
from runtime.graphs import Manifest, NcnnRunner

Content = dict[str, Any]  # JSON: what all three files say


def attempt(make: Callable[..., Content], *arguments: Any) -> Content:
    """What make gives, or why it could not: a report is written whatever is missing."""
    try:
        return make(*arguments)
    except (UnjudgedError, InputError, OSError, ValueError, KeyError) as error:
        return {"problem": f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)}


def pipeline(workspace: Workspace) -> Any:
    """The port without its graphs: preprocessor, tokenizer, stop ids."""
    manifest = Manifest.read(workspace.exporter.base())
    runner = NcnnRunner(manifest, verify=False)
    return importlib.import_module(f"runtime.{workspace.model}").Pipeline(manifest, runner)
