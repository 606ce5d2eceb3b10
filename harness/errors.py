"""The one error that means "could not be judged": told without a traceback, exit code 2."""


class UnjudgedError(Exception):
    """Says what is wrong, where (graph id, file, value), what it should be, and the command to type next."""
