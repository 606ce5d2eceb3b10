"""Calls in a child process, so that a native crash is a result and not the end of the run.

The child is started anew ("spawn": the same on every system, and no lock or thread is inherited), holds the
object that a factory makes, and answers one call at a time over a pipe.
"""

import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self

_START_SECONDS = 120.0  # imports of a cold native library on a busy machine
_CLOSE_SECONDS = 5.0
_TOLD_PLAINLY = (
    "InputError",
    "UnjudgedError",
)  # say all by their message; others carry the child's traceback


class CrashedError(Exception):
    """The child died or did not answer: says in which call, and how it ended."""

    def __init__(self, where: str, how: str) -> None:
        super().__init__(where, how)
        self.where = where
        self.how = how

    def __str__(self) -> str:
        return f"{self.where}: {self.how}"


class ChildError(Exception):
    """An exception of the child that cannot be sent as it is; carries its name, message and traceback."""


class Isolated:
    """The object that `factory` ("module:function", called with args) makes, in a child process.

    The child starts with the first call, and again with the next call after it died.
    """

    def __init__(self, factory: str, *, args: tuple[Any, ...] = (), timeout_seconds: float | None = None) -> None:
        self._factory = factory
        self._args = args
        self._timeout = timeout_seconds
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object; what it raises is raised here, its death is a CrashedError."""
        where = f"{self._factory} {method}"
        if self._pipe is None:
            self._start(where)
        return self._ask((method, args), where, self._timeout)

    def close(self) -> None:
        """End the child; safe to call twice."""
        if self._pipe is not None and self._process is not None:
            try:
                self._pipe.send(None)
                self._process.join(_CLOSE_SECONDS)
            except OSError:  # it is gone already
                pass
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, where: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._factory), daemon=True)
        try:
            self._process.start()
            theirs.close()  # now only the child holds its end, so its death ends the pipe
            self._ask(self._args, where, _START_SECONDS)
        except BaseException:
            self._kill()
            raise

    def _ask(self, question: object, where: str, timeout: float | None) -> Any:
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(pickle.dumps(question))
            if not self._pipe.poll(timeout):
                raise CrashedError(where, f"no answer in {timeout:g} s")
            answered, result = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise CrashedError(where, f"the child process died: {self._ending()}") from None
        except BaseException:  # no answer, or Ctrl-C: a late answer must not be taken for the next one
            self._kill()
            raise
        if not answered:
            raise result
        return result

    def _ending(self) -> str:
        assert self._process is not None
        self._process.join(_CLOSE_SECONDS)
        code = self._process.exitcode
        self._kill()
        return _signal_name(-code) if code is not None and code < 0 else f"exit code {code}"

    def _kill(self) -> None:
        """End the child now, and forget it."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        self._pipe = self._process = None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _serve(pipe: Connection, factory: str) -> None:
    """Run in the child: make the object, then answer until told to end or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    faulthandler.enable()
    held: list[Any] = []
    try:
        while (question := pickle.loads(pipe.recv_bytes())) is not None:
            pipe.send_bytes(_answer(question, held, factory))
    except (EOFError, ConnectionError):
        pass  # the parent is gone


def _answer(question: Any, held: list[Any], factory: str) -> bytes:
    """Pickle (True, result) or (False, exception); the first question holds the factory's arguments."""
    try:
        if held:
            method, args = question
            return pickle.dumps((True, getattr(held[0], method)(*args)))
        held.append(_make(factory, question))
        return pickle.dumps((True, None))
    except Exception as error:
        return pickle.dumps((False, _sendable(error)))


def _make(factory: str, args: tuple[Any, ...]) -> Any:
    module, _, function = factory.partition(":")
    return getattr(importlib.import_module(module), function)(*args)


def _sendable(error: Exception) -> Exception:
    """The error itself where it survives pickling, else a ChildError that says the same."""
    text = "".join(traceback.format_exception(error))
    try:
        if type(error).__name__ not in _TOLD_PLAINLY:
            error.add_note(f"in the child process:\n{text}")
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return ChildError(f"{type(error).__name__}: {error}\nin the child process:\n{text}")
