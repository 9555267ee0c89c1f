"""The encoding of an output topic's keys and values, recorded with the topic by the app that writes it.

Windows' sizes, serdes and `emit` are not in the bytes of a record, so records of two encodings in one topic could not
be told apart. The first app that writes to a topic records the encoding, in the catalog of an embedded log or, for a
Kafka cluster, in the app's state (`tables/@encodings/TOPIC`); another one is refused while the topic holds records.

Values that are JSON objects name their fields, so fields may be added and removed; the stored encoding keeps every
field there was. Avro values from a schema registry name their schema in each record.

Thread rule: one coordinator records; any thread reads.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.storage.backends.base import StorageBackend

_LONGEST_NAME: Final = 150
JSON: Final = "json"
AVRO: Final = "avro"


class TopicEncoding(msgspec.Struct, frozen=True, omit_defaults=True):
    """The encoding of one topic; serdes are the documents of `pipeline.topology.serde`.

    `window` is None for plain records, else `{"kind": "hopping", "size_ms": …, "advance_ms": …}` and the like (a
    tumbling window is hopping, with an advance of its size). `emit` is "update" or "close", "" for plain records.
    `tasks` is how many tasks write windows to the topic; 0: not recorded.
    """

    key: Any
    value: Any
    window: dict[str, Any] | None = None
    key_format: str = ""
    emit: str = ""
    tasks: int = 0

    @property
    def is_update_changelog(self) -> bool:
        """Whether one window may occur several times, each time with its new value."""
        return self.emit == "update"

    @property
    def window_size_ms(self) -> int | None:
        """The size of the windows; None where it is not fixed or there are none."""
        window = self.window or {}
        size = window.get("size_ms", window.get("difference_ms"))
        return None if size is None else int(size)

    @property
    def is_sessions(self) -> bool:
        return (self.window or {}).get("kind") == "session"


def read_encoding(log: Log | KafkaLog, backend: StorageBackend, topic: str) -> TopicEncoding | None:
    """Return the recorded encoding of an existing topic; None if there is none."""
    found = None if isinstance(log, Log) else backend.read_published(_name(topic))
    try:
        if isinstance(log, Log):
            stored = log.describe(topic).encoding
        else:
            stored = None if found is None else msgspec.json.decode(found[0])
        return None if stored is None else msgspec.convert(stored, TopicEncoding)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptError(
            f"what is recorded of the encoding of topic {topic} cannot be read ({error}); was it written by a later "
            "release? Use that one",
            kafka_name=None,
        ) from None


def record_encoding(
    log: Log | KafkaLog, backend: StorageBackend, topic: str, encoding: TopicEncoding
) -> None:
    """Record the encoding of an existing topic, replacing an earlier one."""
    if isinstance(log, Log):
        log.record_encoding(topic, msgspec.to_builtins(encoding))
        return
    found = backend.read_published(_name(topic))
    try:
        backend.publish(
            _name(topic), msgspec.json.encode(encoding), expected=None if found is None else found[1]
        )
    except ConflictError:
        raise ConflictError(
            f"topic {topic}: another process recorded its encoding at the same time; start the app again"
        ) from None


def require_fit(topic: str, recorded: TopicEncoding, now: TopicEncoding, app: str) -> TopicEncoding:
    """Return an encoding that covers both; `InvalidError` where records of the two could not be told apart."""
    changed = [
        f"its {name} was {getattr(recorded, field)} and would be {getattr(now, field)}"
        for field, name in (
            ("key", "key"),
            ("window", "window"),
            ("key_format", "key_format"),
            ("emit", "emit"),
        )
        if getattr(recorded, field) != getattr(now, field)
    ]
    value = _joined(recorded.value, now.value)
    if value is None:
        changed.append(f"its value was {recorded.value} and would be {now.value}")
    if changed:
        raise InvalidError(
            f"app {app} would write another encoding into topic {topic}: {'; '.join(changed)}. Readers could not tell "
            f"the records apart. Send the results to another topic; or, if nobody needs what {topic} holds, delete it "
            f"with `tidegate topic delete {topic}` and, if the app has run before, start over with "
            f"`tidegate app reset {app}`"
        )
    return msgspec.structs.replace(now, value=value)


def _joined(recorded: Any, now: Any) -> Any:
    """Return the value's document with the fields of both; None if they are incompatible."""
    if recorded == now:
        return now
    if not (isinstance(recorded, dict) and isinstance(now, dict)):
        return None
    if AVRO in recorded and AVRO in now:
        return now
    if JSON not in recorded or JSON not in now:
        return None
    known = dict(recorded[JSON])
    if any(known.get(name, kind) != kind for name, kind in now[JSON]):
        return None
    return {JSON: [*recorded[JSON], *([name, kind] for name, kind in now[JSON] if name not in known)]}


def _name(topic: str) -> str:
    short = (
        topic if len(topic) <= _LONGEST_NAME else hashlib.blake2b(topic.encode(), digest_size=16).hexdigest()
    )
    return f"tables/@encodings/t={short}.json"
