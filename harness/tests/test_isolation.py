"""A child that dies, hangs or raises is a result, and the next call has a fresh child."""

import multiprocessing
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from harness.errors import UnjudgedError
from harness.isolation import ChildError, CrashedError, Isolated

VICTIM = "harness.tests.crashing:victim"
SEGFAULT = [] if sys.platform == "win32" else [("read_nowhere", "SIGSEGV")]  # ctypes catches it on Windows


@pytest.fixture(scope="module")
def shared() -> Iterator[Isolated]:
    with Isolated(VICTIM) as isolated:
        yield isolated


def test_object_lives_on_between_calls() -> None:
    with Isolated(VICTIM, args=(5,)) as isolated:
        assert [isolated.call("count") for _ in range(3)] == [6, 7, 8]


def test_arrays_come_back(shared: Isolated) -> None:
    array = np.random.default_rng(1).standard_normal((300, 1000))
    np.testing.assert_array_equal(shared.call("echo", array), array)


@pytest.mark.parametrize(
    ("method", "ending"),
    [("abort", "SIGABRT"), ("leave", "exit code 3"), *SEGFAULT],
)
def test_crash_is_told_and_the_next_call_works(shared: Isolated, method: str, ending: str) -> None:
    with pytest.raises(CrashedError) as caught:
        shared.call(method)
    assert str(caught.value).startswith(f"{VICTIM} {method}: the child process died: ")
    if sys.platform != "win32" or method == "leave":
        assert caught.value.how.endswith(ending)
    assert shared.call("count") == 1


def test_no_answer_in_time_ends_the_child() -> None:
    before = children()
    with Isolated(VICTIM, timeout_seconds=1) as isolated:
        assert isolated.call("count") == 1
        with pytest.raises(CrashedError, match=r"victim sleep: no answer in 1 s"):
            isolated.call("sleep", 60)
        assert children() == before
        assert isolated.call("count") == 1


def test_interrupt_leaves_no_child_and_no_late_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Isolated(VICTIM) as isolated:
        isolated.call("count")
        with monkeypatch.context() as patch:
            patch.setattr("multiprocessing.connection._ConnectionBase.poll", interrupt)
            with pytest.raises(KeyboardInterrupt):
                isolated.call("sleep", 60)
        assert isolated.call("count") == 1


def interrupt(*_: object) -> bool:
    raise KeyboardInterrupt


def test_exceptions_told_plainly_have_no_traceback_text(shared: Isolated) -> None:
    with pytest.raises(UnjudgedError) as caught:
        shared.call("refuse")
    assert str(caught.value) == "T=9, but should be <= 8"
    assert not hasattr(caught.value, "__notes__")


def test_other_exceptions_carry_the_traceback_of_the_child(shared: Isolated) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        shared.call("fail")
    [note] = caught.value.__notes__
    assert note.startswith("in the child process:\nTraceback")
    assert "in fail\n" in note


def test_exception_does_not_end_the_child(shared: Isolated) -> None:
    before = shared.call("count")
    with pytest.raises(ZeroDivisionError):
        shared.call("fail")
    with pytest.raises(AttributeError, match="no_such_method"):
        shared.call("no_such_method")
    assert shared.call("count") == before + 1


def test_what_cannot_be_sent_is_told(shared: Isolated) -> None:
    with pytest.raises(ChildError, match="AwkwardError: awkward 1 2\nin the child process:"):
        shared.call("fail_awkwardly")
    with pytest.raises(Exception, match="lambda"):
        shared.call("unsendable")
    with pytest.raises(Exception, match="lambda"):
        shared.call("echo", lambda: None)
    shared.call("count")


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("harness.tests.crashing:no_victim", UnjudgedError, "the graph is missing"),
        ("harness.tests.crashing:nobody", AttributeError, "nobody"),
        ("harness.tests.nowhere:victim", ModuleNotFoundError, "nowhere"),
    ],
)
def test_factory_that_fails_is_told(factory: str, error: type[Exception], message: str) -> None:
    before = children()
    with Isolated(factory) as isolated:
        with pytest.raises(error, match=message):
            isolated.call("count")
        assert children() == before


def test_close_ends_the_child_and_may_be_repeated() -> None:
    before = children()
    isolated = Isolated(VICTIM)
    isolated.close()
    isolated.call("count")
    assert children() == before + 1
    isolated.close()
    isolated.close()
    assert children() == before


def test_killed_parent_leaves_no_orphan() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=hold_a_child, args=(theirs,))
    parent.start()
    child = psutil.Process(ours.recv())
    parent.kill()
    parent.join()
    assert ended(child)


def hold_a_child(pipe: Connection) -> None:
    """Run in the parent that is going to be killed: start a child and tell its id."""
    isolated = Isolated(VICTIM)
    isolated.call("count")
    pipe.send(multiprocessing.active_children()[0].pid)
    time.sleep(60)


def ended(process: psutil.Process) -> bool:
    try:
        return process.wait(10) is None
    except psutil.NoSuchProcess:
        return True


def children() -> int:
    return len(multiprocessing.active_children())
