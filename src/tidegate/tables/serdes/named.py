"""A serde from its name: as a command line says it (`long`), or as Python writes it (`Json(amount='double')`).

For programs that know a table only by what is stored of it, or are told by an option. What is stored is a serde's
`repr`, and it is read as a constant expression, never run. A serde that text cannot say (one of the user's own, Avro
with its registry) is `None` here: whoever asks then goes on with bytes.
"""

from __future__ import annotations

import ast
from typing import Any

from tidegate.errors import InvalidError
from tidegate.tables.serdes.json_serde import Json
from tidegate.tables.serdes.plain import Bytes, Double, Int, Long, Serde, String

_ALL: tuple[Any, ...] = (Bytes(), String(), Int(), Long(), Double(), Json())
_PLAIN: dict[str, Serde[Any]] = {serde.name: serde for serde in _ALL}
SERDE_NAMES = tuple(_PLAIN)


def serde_from(written: str) -> Serde[Any] | None:
    """The serde that the text says; None when it says something else."""
    text = written.strip()
    found = _PLAIN.get(text.lower())
    if found is not None:
        return found
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        return None
    if not call.keywords:
        return _PLAIN.get(call.func.id.lower())
    if call.func.id.lower() != "json":
        return None
    fields: dict[str, str] = {}
    for keyword in call.keywords:
        if (
            keyword.arg is None
            or not isinstance(keyword.value, ast.Constant)
            or not isinstance(keyword.value.value, str)
        ):
            return None
        fields[keyword.arg] = keyword.value.value
    return Json(**fields)


def require_serde(written: str, what: str) -> Serde[Any]:
    """The serde that the text says, or `InvalidError` with how to say one; `what` is where it was said."""
    found = serde_from(written)
    if found is None:
        raise InvalidError(
            f"{what}={written!r} is no serde: say one of {', '.join(SERDE_NAMES)}, or declare the fields of JSON, "
            "as in Json(amount='double', currency='string')"
        )
    return found
