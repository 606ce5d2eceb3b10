"""The source text that a rewritten layer depends on: what its export is keyed by.

Names used in a class or function are followed to our own classes, functions and constants, so that an edit to
one rewrite leaves the exports of the others alone. Comments, docstrings and line breaks count for nothing.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import UnjudgedError

PACKAGES = ("exporters", "references")  # rewrites read the sizes and tensor names of the model's description
_SCALARS = (str, int, float, bool, type(None))


def source_of(target: Any) -> str:
    """Source of a class or function and of all of ours that it uses."""
    found: dict[str, str] = {}
    _collect(target, found)
    return "\n".join(f"{name}: {found[name]}" for name in sorted(found))


def code_of(path: Path) -> str:
    """Source of a whole file."""
    return _plain(path.read_text(encoding="utf-8"))[0]


def _collect(target: Any, found: dict[str, str]) -> None:
    name = f"{target.__module__}.{target.__qualname__}"
    if name in found:
        return
    found[name], tree = _plain(textwrap.dedent(inspect.getsource(target)))
    for used, value in _globals(tree, sys.modules[target.__module__]):
        if inspect.isclass(value) or inspect.isroutine(value):
            if _is_ours(value.__module__):
                _collect(value, found)
        elif _is_constant(value):
            found[f"{target.__module__}.{used}"] = repr(value)
        elif type(value).__module__ not in ("types", "typing"):  # annotations
            raise UnjudgedError(
                f"{name} uses the global {used}, a {type(value).__name__}, whose edits would not be noticed; "
                "make it a constant of plain numbers and texts, or let a function give it"
            )


def _globals(tree: ast.Module, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Names of the module that the tree uses, and what they stand for; `ours.name` counts as a name."""
    scope = vars(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            value = inspect.unwrap(scope[node.id])
            if not isinstance(value, ModuleType):
                yield node.id, value
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            if isinstance(owner, ModuleType) and _is_ours(owner.__name__) and hasattr(owner, node.attr):
                yield f"{node.value.id}.{node.attr}", inspect.unwrap(getattr(owner, node.attr))


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in PACKAGES


def _is_constant(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_constant, [*value, *value.values()]))
    return isinstance(value, _SCALARS) or (isinstance(value, tuple | list) and all(map(_is_constant, value)))


def _plain(source: str) -> tuple[str, ast.Module]:
    """The source as the parser writes it, without docstrings; and its tree."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree), tree
