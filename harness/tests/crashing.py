"""An object for the isolation tests to hold in a child: it does everything that should not end a run."""

import ctypes
import os
import time

from harness.errors import UnjudgedError


class AwkwardError(Exception):
    """Cannot be unpickled: its constructor wants more than its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"awkward {one} {two}")


class Victim:
    """Counts its calls, so that a fresh child shows."""

    def __init__(self, start: int = 0) -> None:
        self.calls = start

    def count(self) -> int:
        """Return how often this object was called."""
        self.calls += 1
        return self.calls

    def echo(self, value: object) -> object:
        """Return the value."""
        return value

    def abort(self) -> None:
        """Die as a failed native assertion does."""
        os.abort()

    def read_nowhere(self) -> None:
        """Die as a native read outside of memory does."""
        ctypes.string_at(1)

    def leave(self) -> None:
        """Exit without an answer."""
        os._exit(3)

    def sleep(self, seconds: float) -> None:
        """Answer late."""
        time.sleep(seconds)

    def refuse(self) -> None:
        """Raise what is told by its message."""
        raise UnjudgedError("T=9, but should be <= 8")

    def fail(self) -> float:
        """Raise what is told with its traceback."""
        return 1 / 0

    def fail_awkwardly(self) -> None:
        """Raise what cannot be sent."""
        raise AwkwardError(1, 2)

    def unsendable(self) -> object:
        """Return what cannot be sent."""
        return lambda: None


def victim(start: int = 0) -> Victim:
    """Make the object."""
    return Victim(start)


def no_victim() -> Victim:
    """Fail to make the object."""
    raise UnjudgedError("the graph is missing")
