"""How the dump shows keys and values: text by default, numbers, or Kafka's internal records.

Names are those of Kafka's decoder classes (with or without package) and short ones: `string`, `integer`,
`long`, `default`. Java's default decoder prints an object's address; ours prints the bytes as hex.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import Struct
from typing import Any, Final, TypeAlias

from tidegate.errors import CorruptError, InvalidError
from tidegate.log.dump.messages import (
    CONSUMER_ASSIGNMENT,
    CONSUMER_SUBSCRIPTION,
    GROUP_RECORDS,
    TRANSACTION_KEY,
    TRANSACTION_VALUE,
    read_message,
)
from tidegate.log.dump.records import java_text

TOMBSTONE: Final = "<DELETE>"
_INT16 = Struct(">h")
_TRANSACTION_STATES: Final = (
    "Empty",
    "Ongoing",
    "PrepareCommit",
    "PrepareAbort",
    "CompleteCommit",
    "CompleteAbort",
    "Dead",
    "PrepareEpochFence",
)

Decoder: TypeAlias = Callable[[bytes], str]
RecordParser: TypeAlias = "Callable[[int, bytes | None, bytes | None], tuple[str | None, str | None]]"


def find_decoder(name: str) -> Decoder | None:
    """The decoder of that (class) name; None for text, which is decoded a column at a time."""
    short = name.rpartition(".")[2].lower().removesuffix("decoder") or "string"
    if short == "string":
        return None
    if short in ("integer", "long"):
        layout = Struct(">i" if short == "integer" else ">q")
        return lambda data: _number(data, layout, name)
    if short in ("default", "bytearray", "hex"):
        return lambda data: data.hex()
    raise InvalidError(
        f"no decoder {name!r}: there are StringDecoder, IntegerDecoder, LongDecoder and DefaultDecoder (hex)"
    )


def _number(data: bytes, layout: Struct, name: str) -> str:
    if len(data) < layout.size:
        raise CorruptError(f"{len(data)} bytes where {name} reads {layout.size}; choose another decoder")
    return str(layout.unpack_from(data)[0])


def parse_with(key: Decoder | None, value: Decoder | None) -> RecordParser | None:
    """A parser from two decoders; None when both are text."""
    if key is None and value is None:
        return None
    shown_key, shown_value = key or _text, value or _text

    def parse(_: int, key: bytes | None, value: bytes | None) -> tuple[str | None, str | None]:
        return (
            None if key is None else shown_key(key),
            None if value is None else shown_value(value),
        )

    return parse


def _text(data: bytes) -> str:
    return java_text(data) or ""


def compact_json(value: Any) -> str:
    """JSON as the Java tool prints it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def parse_offsets_record(
    offset: int, key: bytes | None, value: bytes | None
) -> tuple[str | None, str | None]:
    """A record of `__consumer_offsets`."""
    if key is None or len(key) < 2:
        raise CorruptError(
            f"the record at offset {offset} has no key, so it is not from __consumer_offsets; "
            f"dump it without --offsets-decoder",
            offset=offset,
        )
    (kind,) = _INT16.unpack_from(key)
    if kind not in GROUP_RECORDS:
        return f"Unknown record type {kind} at offset {offset}, skipping.", None
    key_schema, value_schema = GROUP_RECORDS[kind]
    try:
        version, fields = read_message(key, key_schema)
        shown_key = compact_json({"type": str(version), "data": fields})
        if value is None:
            return shown_key, TOMBSTONE
        version, fields = read_message(value, value_schema)
    except CorruptError as error:
        return f"Error at offset {offset}, skipping. {error}", None
    if kind == 2 and fields["protocolType"] == "consumer":
        _open_members(fields["members"] or [])
    return shown_key, compact_json({"version": str(version), "data": fields})


def _open_members(members: list[dict[str, Any]]) -> None:
    """Consumers' subscription and assignment are messages of their own; what does not parse stays bytes."""
    import base64

    for member in members:
        for name, schema in (("subscription", CONSUMER_SUBSCRIPTION), ("assignment", CONSUMER_ASSIGNMENT)):
            try:
                member[name] = read_message(base64.b64decode(member[name] or ""), schema)[1]
            except CorruptError:
                continue


def parse_transaction_record(
    offset: int, key: bytes | None, value: bytes | None
) -> tuple[str | None, str | None]:
    """A record of `__transaction_state`."""
    if key is None or len(key) < 2:
        raise CorruptError(
            f"the record at offset {offset} has no key, so it is not from __transaction_state; "
            f"dump it without --transaction-log-decoder",
            offset=offset,
        )
    (version,) = _INT16.unpack_from(key)
    if version != 0:
        return f"unknown::version={version}", None
    _, named = read_message(key, TRANSACTION_KEY)
    shown_key = f"transaction_metadata::transactionalId={named['transactionalId']}"
    if value is None:
        return shown_key, TOMBSTONE
    _, fields = read_message(value, TRANSACTION_VALUE)
    status = fields["transactionStatus"]
    state = _TRANSACTION_STATES[status] if 0 <= status < len(_TRANSACTION_STATES) else str(status)
    partitions = [
        f"{entry['topic']}-{number}"
        for entry in fields["transactionPartitions"] or []
        for number in entry["partitionIds"] or []
    ]
    return shown_key, (
        f"producerId:{fields['producerId']},producerEpoch:{fields['producerEpoch']},state={state},"
        f"partitions=[{','.join(partitions)}],"
        f"txnLastUpdateTimestamp={fields['transactionLastUpdateTimestampMs']},"
        f"txnTimeoutMs={fields['transactionTimeoutMs']}"
    )
