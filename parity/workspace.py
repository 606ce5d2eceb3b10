"""Where everything of one model and one checkpoint is: found, or built on demand into the store under `.parity/`."""

import importlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from exporters.export import Exporter
from harness.dumps import Dump, dump_paths, read_dump, write_dump
from harness.errors import UnjudgedError
from harness.graphs import Graph
from harness.ids import suggest
from harness.resources import Mode, require
from harness.scratch import Scratch, discard
from harness.store import Store, atomic_write_text, key
from references import MODELS, PACKAGES

ROOT = Path(__file__).parents[1]
COMMITTED = ROOT / "references" / "dumps"
LENGTHS = (1, 6, 13)  # shape cases: pairwise different, one of length 1, one no multiple of 2 or 4
MADE_WITH = sorted((ROOT / "references").rglob("*.py"))


@dataclass(frozen=True)
class Choice:
    """What is judged: a model's own checkpoint of a profile or a folder of the user's, and which of its cases."""

    model: str
    profile: str = ""  # "" means the model's default, the first of its PROFILES
    checkpoint: Path | None = None
    cases: tuple[str, ...] = ()  # () means all of the default profile, the default case of any other checkpoint
    build: bool = True
    only: tuple[str, ...] = ("*",)  # of a synthetic checkpoint: globs on the tensors that it holds

    def flags(self) -> str:
        """What chooses the checkpoint on a command line, behind a space; "" for the model's default."""
        if self.checkpoint:
            return f" --checkpoint {shlex.quote(str(self.checkpoint))}"
        return f" --profile {self.profile}" if self.profile else ""

    def arguments(self) -> str:
        """Model and checkpoint for a command line."""
        return f"{self.model}{self.flags()}"

    def options(self) -> str:
        """What chooses checkpoint and cases, behind a space."""
        return self.flags() + "".join(f" --case {name}" for name in self.cases)

    def pytest_options(self) -> str:
        """The same choice for pytest, behind a space; "" for the default, where `-k` alone finds every id."""
        return f" --model {self.model}{self.options()}" if self.flags() else ""


class Workspace:
    """Finds or builds checkpoint, dumps and graphs of a choice. Raises UnjudgedError with the command to type."""

    def __init__(self, choice: Choice) -> None:
        if choice.model not in MODELS:
            raise UnjudgedError(f"model {choice.model} is unknown; did you mean {suggest(choice.model, MODELS)}?")
        self.choice, self.model = choice, choice.model
        self.description = importlib.import_module(f"references.{choice.model}")
        profiles = self.description.PROFILES
        self.profile = choice.profile or next(iter(profiles))
        if choice.checkpoint is None and self.profile not in profiles:
            raise UnjudgedError(f"profile {self.profile} is unknown; did you mean {suggest(self.profile, profiles)}?")
        self.store = Store(home() / "store", build=choice.build)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json of the checkpoint, without building one."""
        if self.choice.checkpoint is None:
            return dict(self.description.PROFILES[self.profile])
        path = self.choice.checkpoint / "config.json"
        if not path.is_file():
            raise UnjudgedError(
                f"checkpoint {self.choice.checkpoint} has no config.json; pass the folder that holds it"
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UnjudgedError(f"{path} is not JSON ({error}); fetch the file again") from error
        if not isinstance(found, dict):
            raise UnjudgedError(f"{path} holds a JSON {type(found).__name__}, but should hold an object")
        return found

    @cached_property
    def graphs(self) -> dict[str, Graph]:
        """Every graph by id, in execution order."""
        sizes = self.description.read_sizes(self.config, self.choice.checkpoint or Path(self.profile))
        return {graph.id: graph for graph in self.description.graphs(sizes)}

    @cached_property
    def cases(self) -> dict[str, Any]:
        """The chosen cases by name; a checkpoint that is not the model's default has one, unless more are named."""
        every = tuple(case.name for case in self.description.CASES)
        known = {case.name: case for case in (*self.description.CASES, *self.description.WIDE_CASES)}
        one = next(iter(self.description.WIDE_CASES), self.description.CASES[0]).name
        names = self.choice.cases or (every if self.is_default else (one,))
        for name in names:
            if name not in known:
                raise UnjudgedError(f"case {name} is unknown; did you mean {suggest(name, known)}?")
        return {name: known[name] for name in names}

    @cached_property
    def checkpoint(self) -> Path:
        """The checkpoint folder: the user's own, or the synthetic one."""
        if self.choice.checkpoint is not None:
            return self.choice.checkpoint
        profile = self.profile
        name = _source_key(self.model, profile, self.choice.only)

        def build(folder: Path) -> None:
            require(Mode(command, disk=self._checkpoint_bytes(), memory=0), (), folder)
            importlib.import_module(f"references.{self.model}.source").write(folder, profile, only=self.choice.only)

        command = f"python -m parity checkpoint {self.choice.arguments()}"
        return self.store.get("checkpoint", name, build, name=f"{self.model} {profile} checkpoint", command=command)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the checkpoint's files; remembered as long as their sizes and times stay the same."""
        _ = self.config  # tells a folder that is no checkpoint
        files = sorted(path for path in self.checkpoint.iterdir() if path.is_file())
        seen = key(files=[[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files])
        remembered = home() / "fingerprints" / f"{seen}.txt"
        if remembered.is_file():
            return remembered.read_text(encoding="utf-8")
        from references.checkpoint import Checkpoint

        found = Checkpoint(self.checkpoint).fingerprint()
        atomic_write_text(remembered, found)
        return found

    @cached_property
    def exporter(self) -> Exporter:
        """Exports this checkpoint."""
        return Exporter(self.model, self.checkpoint, self.fingerprint, self.store, arguments=self.choice.arguments())

    @property
    def is_default(self) -> bool:
        """Whether this is the model's own checkpoint of its default profile."""
        return self.choice.checkpoint is None and self.profile == next(iter(self.description.PROFILES))

    def dump(self, name: str, tell: Callable[[Any], None] | None = None) -> Dump:
        """The reference dump of a case or of a shape case `length_N`; `tell` hears how far it is, where it is made.

        Raises UnjudgedError on another name.
        """
        known = [*self.cases, *shape_cases()]
        if name not in known:
            raise UnjudgedError(f"case {name} is unknown; did you mean {suggest(name, known)}?")
        if self.is_committed(name):
            wanted = {"checkpoint": self.fingerprint, "case": self.cases[name].identity()}
            command = f"python -m parity dumps {self.model} --commit"
            return read_dump(COMMITTED / self.model, name, command=command, expect_provenance=wanted)
        folder = self._dump_folder(name, tell)
        return read_dump(folder, name, command=f"python -m parity dumps {self.choice.arguments()}")

    def has_dump(self, name: str) -> bool:
        """Whether a dump is there already."""
        return self.is_committed(name) or all(path.is_file() for path in dump_paths(self._dump_path(name), name))

    def is_committed(self, name: str) -> bool:
        """Whether a case's dump stands in the repository: the default case of the default profile."""
        default = next(iter(self.description.CASES)).name
        return name == default and self.is_default

    def make_dump(self, name: str, scratch: Scratch | None = None, tell: Callable[[Any], None] | None = None) -> Dump:
        """Run the reference for a case, whatever is stored; a scratch on disk lets a broken run go on."""
        from references import dumping

        if name.startswith("length_"):
            length = int(name.removeprefix("length_"))
            return dumping.build_shapes(self.model, self.checkpoint, length, scratch, tell)
        return dumping.build(self.model, self.checkpoint, self.cases[name], scratch, tell)

    def remove_dump(self, name: str) -> None:
        """Remove a case's dump from the store, and what a broken run left of it."""
        shutil.rmtree(self._dump_path(name), ignore_errors=True)
        discard(self._scratch_path(name))

    def _scratch_path(self, name: str) -> Path:
        return home() / "unfinished" / f"{self.model}-{name}-{self.fingerprint[:8]}-{self._dump_key(name)}.db"

    def _dump_folder(self, name: str, tell: Callable[[Any], None] | None) -> Path:
        path = self._scratch_path(name)

        def build(folder: Path) -> None:
            # what code made that has changed since
            for stale in path.parent.glob(f"{self.model}-{name}-{self.fingerprint[:8]}-*.db"):
                if stale != path:
                    discard(stale)
            scratch = Scratch(path)
            try:
                write_dump(folder, self.make_dump(name, scratch, tell))
            finally:
                scratch.close()

        command = f"python -m parity dumps {self.choice.arguments()}"
        folder = self.store.get("dump", self._dump_key(name), build, name=f"dump of case {name}", command=command)
        discard(path)
        return folder

    def _checkpoint_bytes(self) -> int:
        """Size of the synthetic checkpoint: two bytes for a number; a part of it is smaller."""
        shapes = self.description.tensors(self.description.read_sizes(self.config, Path(self.profile)))
        chosen = (shape for name, shape in shapes.items() if any(fnmatch(name, part) for part in self.choice.only))
        return 2 * sum(map(math.prod, chosen))

    def _dump_path(self, name: str) -> Path:
        return self.store.root / "dump" / self._dump_key(name)

    def _dump_key(self, name: str) -> str:
        case = self.cases[name].identity() if name in self.cases else name
        versions = {name: version(name) for name in PACKAGES}
        return key(checkpoint=self.fingerprint, case=case, made_with=MADE_WITH, versions=versions)


def run_command(choices: Sequence[Choice]) -> str:
    """The command that judges everything of some choices, which share profile or checkpoint, and cases."""
    models = " ".join(choice.model for choice in choices)
    return f"python -m parity run {models}{choices[0].options()}"


def shape_cases() -> list[str]:
    """Names of the shape cases."""
    return [f"length_{length}" for length in LENGTHS]


def home() -> Path:
    """Where artefacts live: `.parity/` beside the code, or PARITY_HOME."""
    return Path(os.environ.get("PARITY_HOME", ROOT / ".parity"))


def tensor_name(graph: Graph, port: str) -> str:
    """Name of a graph's output in a dump."""
    return f"{graph.id.partition('/')[2]}.{port}"


def case_names(workspace: Workspace) -> Iterable[str]:
    """Every case with graphs: the chosen ones, then the shape cases."""
    return [*workspace.cases, *shape_cases()]


@lru_cache
def _source_key(model: str, profile: str, only: tuple[str, ...]) -> str:
    """Key of a synthetic checkpoint: what decides its bytes, so that other edits do not write gigabytes again."""
    folder = ROOT / "references"
    parts = [folder / "generator.py", folder / "shards.py"]
    parts += [folder / model / name for name in ("source.py", "config.py", "weights.py")]
    parts += sorted(path for path in (folder / model).glob("*") if path.suffix in (".json", ".jinja"))
    return key(profile=profile, only=only, made_with=parts)
