"""`log.writer(topic, integrity=True)`: a writer inside the sender of the integrity room.

Imports point the other way, from `integrity` to `log`; for the user's sake this one call goes by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def numbered(writer: Any, integrity: bool | Mapping[str, Any], **ports: Any) -> Any:
    """A `Sender` around `writer`; a mapping holds the sender's own settings."""
    settings = {} if isinstance(integrity, bool) else dict(integrity)
    return import_module("tidegate.integrity.sender").Sender(writer, **{**ports, **settings})
