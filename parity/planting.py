"""pytest plugin that plants a fault of the corpus into the port that is judged: `-p parity.planting --fault NAME`."""

import tempfile
from pathlib import Path

import pytest

from harness.ids import suggest
from parity.faults import FAULTS
from parity.faults.port import Port

FOLDER = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the fault."""
    parser.getgroup("parity").addoption("--fault", required=True, metavar="NAME", help="fault of the corpus to plant")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """The port of the fault's model is one in which the fault is planted."""
    from parity.plugin import SESSION  # not earlier: pytest rewrites the asserts of a plugin before it is imported

    name = config.getoption("--fault")
    fault = next((fault for fault in FAULTS if fault.name == name), None)
    if fault is None:
        near = suggest(name, [fault.name for fault in FAULTS])
        raise pytest.UsageError(f"fault {name} is not in the corpus; did you mean {near}?")
    config.stash[FOLDER] = tempfile.TemporaryDirectory()
    session = config.stash[SESSION]
    port = Port(session.workspaces[fault.model], Path(config.stash[FOLDER].name) / "model")
    fault.plant(port)
    session.workspaces[fault.model] = port.workspace
    session.ports[fault.model] = port


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing planted is left."""
    if FOLDER in config.stash:
        config.stash[FOLDER].cleanup()
