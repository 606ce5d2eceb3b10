"""Playing mutations of the harness, each in a pytest process of its own, and the plugin that plants one there.

A mutation that does not apply any more, whose code no test reaches, or whose test has gone raises LookupError: its red
or green would prove nothing.
"""

import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parity.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
NAME, EXPECTED = "PARITY_MUTATION", "PARITY_EXPECTED"  # how a process is told what to plant, and what must turn red
SEEN, UNSEEN, GONE = 90, 91, 92  # exit codes that pytest does not have
PYTEST = ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "parity.mutating")


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation; `said` is the end of what pytest wrote."""

    name: str
    expected: tuple[str, ...]
    seen: bool
    seconds: float
    said: str


def find(name: str) -> Mutation:
    """The mutation of a name."""
    return next(mutation for mutation in MUTATIONS if mutation.name == name)


def play_all(mutations: Sequence[Mutation] = MUTATIONS, *, workers: int = 2) -> list[Outcome]:
    """The outcomes in the order given. Raises LookupError where one has gone, or a test is red without any."""
    check_green(mutations)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(play, mutations))


def check_green(mutations: Sequence[Mutation]) -> None:
    """Run what must turn red with nothing planted. Raises LookupError unless it is green."""
    done = _pytest("", [node for mutation in mutations for node in mutation.expected])
    if done.returncode != pytest.ExitCode.OK:
        raise LookupError(f"red without any mutation: {_end(done)}")


def play(mutation: Mutation) -> Outcome:
    """Plant a mutation and run what must turn red. Raises LookupError where it does not apply any more."""
    began = time.perf_counter()
    done = _pytest(mutation.name, mutation.expected)
    seconds = time.perf_counter() - began
    if done.returncode not in (SEEN, UNSEEN):
        raise LookupError(f"{mutation.name}: the mutation does not apply any more: {_end(done)}")
    return Outcome(mutation.name, mutation.expected, done.returncode == SEEN, seconds, _end(done))


def _pytest(name: str, expected: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    files = sorted({node.partition("::")[0] for node in expected})
    with tempfile.TemporaryDirectory() as home:  # the records of a run are not touched
        told = {NAME: name, EXPECTED: "\n".join(dict.fromkeys(expected)), "PARITY_HOME": home}
        told["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is needed, and they take longer to load than tests to run
        ours = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        return subprocess.run(
            [sys.executable, *PYTEST, *files],
            cwd=ROOT,
            env=ours | told,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )


def _end(done: "subprocess.CompletedProcess[str]") -> str:
    return (done.stdout + done.stderr)[-2000:]


# ---- in the process that is planted into


class Planted:
    """One mutation in this process: whether its code was reached, and which tests are red."""

    def __init__(self, mutation: Mutation | None, expected: Sequence[str]) -> None:
        self.mutation, self.expected = mutation, expected
        self.reached = False
        self.red: list[str] = []
        if mutation is not None:
            self._plant(mutation)

    def _plant(self, mutation: Mutation) -> None:
        """Replace the attribute before any test imports it. Raises LookupError where it is not there or the same."""
        module, _, path = mutation.where.partition(":")
        *owners, name = path.split(".")
        holder: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        if not hasattr(holder, name):
            raise LookupError(f"{mutation.where} is not there")
        original = getattr(holder, name)
        faulty = mutation.how(original)
        if faulty == original:
            raise LookupError(f"{mutation.where} stays as it is")
        setattr(holder, name, self._noting(faulty) if callable(original) else faulty)
        self.reached = not callable(original)  # a constant is read, and nothing tells

    def _noting(self, faulty: Any) -> Any:
        @functools.wraps(faulty)
        def noted(*arguments: Any, **named: Any) -> Any:
            self.reached = True
            return faulty(*arguments, **named)

        return noted

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Only what must turn red is run. Raises LookupError where a test has gone."""
        for begin in self.expected:
            if not any(item.nodeid.startswith(begin) for item in items):
                raise LookupError(f"{begin} is no test")
        items[:] = [item for item in items if item.nodeid.startswith(tuple(self.expected))]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what is red."""
        if report.when == "call" and report.failed:
            self.red.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Seen where all of `expected` have a red test."""
        ran = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if self.mutation is not None and ran:
            seen = all(any(node.startswith(begin) for node in self.red) for begin in self.expected)
            session.exitstatus = GONE if not self.reached else SEEN if seen else UNSEEN


def pytest_configure(config: pytest.Config) -> None:
    """Plant what the environment names."""
    if EXPECTED in os.environ:
        mutation = find(os.environ[NAME]) if os.environ[NAME] else None
        config.pluginmanager.register(Planted(mutation, os.environ[EXPECTED].split("\n")))
