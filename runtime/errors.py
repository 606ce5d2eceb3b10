"""The one error that a user of the runtime sees: bad input, told without a traceback, exit code 2."""

EXPORT_AGAIN = "export the model again: python -m parity export MODEL"


class InputError(Exception):
    """Says what is wrong, where, what it should be, and what to do next."""
