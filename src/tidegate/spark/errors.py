"""Errors of tasks as values, so that the driver can raise what the task raised.

Spark turns a Python exception into a Java one with a traceback as its text; a program cannot act on that. What a
task raises on purpose (`TidegateError`) is returned like a result instead: its class by name, its message and its
fields. A class that is defined outside of `errors` is returned as its nearest base class in `errors`.

Thread rule: pure functions.
"""

from __future__ import annotations

import builtins
import traceback
from pathlib import Path
from typing import Final

import msgspec

from tidegate import errors
from tidegate.errors import InternalError, TidegateError

LONGEST_TRACE: Final = 20_000
_KNOWN: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TidegateError)
}
_PATHS: Final = frozenset({"path"})  # fields that are paths in the class and text in the message

Field = int | float | str | bool | None


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as a value. `trace` is the part of the traceback that is shown to users."""

    kind: str
    message: str
    fields: dict[str, Field] = {}
    trace: str = ""


def describe(error: Exception) -> Failure:
    """Return an error as a value."""
    kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KNOWN), None)
    if kind is None:
        kind = type(error).__name__
    fields: dict[str, Field] = {}
    if isinstance(error, TidegateError):
        for name, value in vars(error).items():
            if isinstance(value, Path):
                fields[name] = str(value)
            elif value is None or isinstance(value, int | float | str):
                fields[name] = value
    trace = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
    return Failure(kind, str(error), fields, trace)


def rebuild(failure: Failure) -> Exception:
    """Return the error: the same class, message and fields, with its original place as a note.

    Other exceptions become the built-in exception of their name; an unknown class becomes an `InternalError` that
    names it.
    """
    kind = _KNOWN.get(failure.kind)
    if kind is None:
        found = _built_in(failure)
        found.add_note(failure.trace)
        return found
    error = kind.__new__(kind, failure.message)  # constructors differ; their attributes are in the fields
    Exception.__init__(error, failure.message)
    for name, value in failure.fields.items():
        setattr(error, name, Path(value) if name in _PATHS and isinstance(value, str) else value)
    error.add_note(failure.trace)
    return error


def _built_in(failure: Failure) -> Exception:
    kind = getattr(builtins, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            made = kind(failure.message)
        except TypeError:  # its constructor needs more than a message
            pass
        else:
            return made
    return InternalError(f"a task failed with {failure.kind}: {failure.message}")
