"""How a table reads its topic: the serdes of raw keys and values, and what happens to records it cannot take.

`key` and `value` are the serdes of the *raw* key and value; the table adds the window to the key itself, so a
windowed serde in here would wrap it twice and is refused.

Thread rule: a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Literal

from tidegate.durations import DurationLike
from tidegate.errors import InvalidError
from tidegate.integrity.state import max_age_of
from tidegate.integrity.validator import OnError, policy_of, require_new_names
from tidegate.tables.serdes.plain import Serde
from tidegate.tables.serdes.windowed import require_raw


@dataclass(frozen=True, slots=True)
class Consumed:
    """`Consumed(String(), Long())`.

    `on_value_error`: a value that its serde cannot read stops the table (`fail`), is left out and counted (`drop`) or
    becomes a dead letter (`keep`).
    `on_gap`: when records aged out of the topic before the table saw them, go on at the earliest one there is, with
    a warning and a count (`earliest`), or stop (`fail`). `advance` is what every window start is a multiple of,
    where that is known: keys that break it are refused. Of dead letters at most `dead_letter_bytes` are kept; those
    beyond are counted. `on_error`: a record that is not what its producer sent becomes a dead letter (`keep`), is left
    out (`drop`) or stops the table (`fail`), as in `Stream.validate`; before a push has ended every fault stops it.
    Producers silent for longer than `max_age` are forgotten, None for never.
    """

    key: Serde[Any] | None = None
    value: Serde[Any] | None = None
    isolation: Literal["read_uncommitted", "read_committed"] = "read_uncommitted"
    on_value_error: OnError | str = OnError.FAIL
    on_gap: Literal["earliest", "fail"] = "earliest"
    advance: int | None = None
    dead_letter_bytes: int = 64 << 20
    on_error: str | Mapping[str, str] = "keep"
    max_age: DurationLike | None = "7d"
    on_fault: InitVar[object] = None  # old names: refused with the new one
    on_bad_value: InitVar[object] = None

    def __post_init__(self, on_fault: object, on_bad_value: object) -> None:
        if on_fault is not None:
            require_new_names("Consumed(…, ", {"on_fault": on_fault}, {"on_fault": "on_error"})
        if on_bad_value is not None:
            given, new = {"on_bad_value": on_bad_value}, {"on_bad_value": "on_value_error"}
            require_new_names("Consumed(…, ", given, new, {"skip": "keep"})
        for serde in (self.key, self.value):
            if serde is not None:
                require_raw(serde)
        object.__setattr__(self, "on_value_error", OnError.of(self.on_value_error))
        if self.isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidError(f"isolation={self.isolation!r}: choose 'read_uncommitted' or 'read_committed'")
        if self.on_gap not in ("earliest", "fail"):
            raise InvalidError(f"on_gap={self.on_gap!r}: choose 'earliest' or 'fail'")
        policy_of(self.on_error)
        max_age_of(self.max_age)
        if self.dead_letter_bytes < 0:
            raise InvalidError(f"dead_letter_bytes={self.dead_letter_bytes}: give 0 or more")
