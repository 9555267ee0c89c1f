"""Decoders for keys and values in a dump: text by default, numbers, or Kafka's internal records.

Names are those of Kafka's decoder classes (with or without package) and short ones: `string`, `integer`,
`long`, `default`. Java's default decoder prints an object's address; this one prints the bytes as hex.

`MessageReader` reads Kafka's versioned message format by schema. The schemas are those of Kafka 3.9 for
`__consumer_offsets`, `__transaction_state` and control batches; cluster metadata and remote log metadata are
not covered.

    message   int16 version, then the fields the version has, in order
    classic   string int16 length | bytes, array int32 length      (-1: null)
    flexible  string, bytes, array: unsigned varint length + 1      (0: null); every struct ends with tagged
              fields: varint count, { varint tag, varint size, value }
    uuid      16 bytes, printed as 22 characters of URL-safe base64

In JSON a field's name starts with a lower-case letter, bytes are base64, tagged fields appear when set.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, TypeAlias

from tidegate.errors import CorruptError, InvalidError
from tidegate.log.dump.records import java_text

_NUMBERS: Final = {
    "int8": Struct(">b"),
    "int16": Struct(">h"),
    "uint16": Struct(">H"),
    "int32": Struct(">i"),
    "int64": Struct(">q"),
}
_LATEST = 32767


@dataclass(frozen=True, slots=True)
class Field:
    """One field: a type (`int32`, `string`, `[]string`, `[]struct`, `struct`), the versions that have it."""

    name: str
    type: str
    first: int = 0
    last: int = _LATEST
    fields: tuple[Field, ...] = ()
    tag: int | None = None


@dataclass(frozen=True, slots=True)
class Schema:
    """A message: its versions, the first flexible one, and its fields."""

    versions: tuple[int, int]
    flexible: int
    fields: tuple[Field, ...]


def read_message(data: bytes, schema: Schema) -> tuple[int, dict[str, Any]]:
    """Return the version at the start of a message, and its fields as printed; `CorruptError` when malformed."""
    reader = _Reader(data)
    version = reader.number("int16")
    if not schema.versions[0] <= version <= schema.versions[1]:
        raise CorruptError(
            f"message version {version} is not among {schema.versions[0]}…{schema.versions[1]}"
        )
    reader.flexible = version >= schema.flexible
    return version, reader.struct(schema.fields, version)


def read_versionless(data: bytes, schema: Schema, version: int) -> dict[str, Any]:
    """Return the fields of a message that has no version at its start."""
    reader = _Reader(data)
    reader.flexible = version >= schema.flexible
    return reader.struct(schema.fields, version)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.flexible = False

    def struct(self, fields: tuple[Field, ...], version: int) -> dict[str, Any]:
        present = [field for field in fields if field.first <= version <= field.last]
        out = {field.name: self.value(field, version) for field in present if field.tag is None}
        if self.flexible:
            self._tagged(out, {field.tag: field for field in present if field.tag is not None}, version)
        return out

    def value(self, field: Field, version: int) -> Any:
        if field.type in _NUMBERS:
            return self.number(field.type)
        if field.type == "struct":
            return self.struct(field.fields, version)
        if field.type == "uuid":
            return base64.urlsafe_b64encode(self.take(16)).rstrip(b"=").decode("ascii")
        if field.type == "string":
            length = self._length("int16")
            return None if length < 0 else self.take(length).decode("utf-8", "replace")
        if field.type == "bytes":
            length = self._length("int32")
            return None if length < 0 else base64.b64encode(self.take(length)).decode("ascii")
        count = self._length("int32")
        if count < 0:
            return None
        if count > len(self._data):
            raise CorruptError(f"{field.name} says it has {count} elements")
        element = Field(field.name, field.type.removeprefix("[]"), fields=field.fields)
        return [self.value(element, version) for _ in range(count)]

    def number(self, kind: str) -> int:
        layout = _NUMBERS[kind]
        number: int = layout.unpack(self.take(layout.size))[0]
        return number

    def take(self, length: int) -> bytes:
        if length < 0 or length > len(self._data) - self._at:
            raise CorruptError(f"{length} bytes wanted where {len(self._data) - self._at} are left")
        self._at += length
        return self._data[self._at - length : self._at]

    def _length(self, classic: str) -> int:
        return self._unsigned_varint() - 1 if self.flexible else self.number(classic)

    def _unsigned_varint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptError("a number has more than 5 bytes")

    def _tagged(self, out: dict[str, Any], known: dict[int | None, Field], version: int) -> None:
        for _ in range(self._unsigned_varint()):
            tag, size = self._unsigned_varint(), self._unsigned_varint()
            end = self._at + size
            field = known.get(tag)
            if field is None:
                self.take(size)
                continue
            if field.type == "struct" and self.number("int8") < 0:  # a nullable struct starts with -1 or 1
                out[field.name] = None
            else:
                out[field.name] = self.value(field, version)
            if self._at != end:
                raise CorruptError(f"the tagged field {field.name} is not {size} bytes long")


def _fields(text: str, **inner: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the fields of `NAME TYPE [FIRST+ or FIRST-LAST], …`; `inner` has the fields of structs by name."""
    fields = []
    for each in text.split(","):
        name, kind, *versions = each.split()
        first, _, last = versions[0].partition("-") if versions else ("0", "", "")
        span = int(first.removesuffix("+")), int(last) if last else _LATEST
        fields.append(Field(name, kind, *span, inner.get(name, ())))
    return tuple(fields)


def _schema(first: int, last: int, flexible: int, text: str, **inner: tuple[Field, ...]) -> Schema:
    return Schema((first, last), flexible, _fields(text, **inner))


_NEVER = _LATEST
_TOPIC_PARTITIONS = _fields("topicId uuid, partitions []int32")
_NAMED_PARTITIONS = _fields("topic string, partitions []int32")
CONSUMER_SUBSCRIPTION: Final = _schema(
    0, _LATEST, _NEVER,
    "topics []string, userData bytes, ownedPartitions []struct 1+, generationId int32 2+, rackId string 3+",
    ownedPartitions=_NAMED_PARTITIONS,
)  # fmt: skip
CONSUMER_ASSIGNMENT: Final = _schema(
    0, _LATEST, _NEVER, "assignedPartitions []struct, userData bytes", assignedPartitions=_NAMED_PARTITIONS
)
_OFFSET_KEY = "group string, topic string, partition int32"
_OFFSET_VALUE = _schema(
    0, 4, 4,
    "offset int64, leaderEpoch int32 3+, metadata string, commitTimestamp int64, expireTimestamp int64 1-1",
)  # fmt: skip
_GROUP_VALUE = _schema(
    0, 4, 4,
    "protocolType string, generation int32, protocol string, leader string, currentStateTimestamp int64 2+, "
    "members []struct",
    members=_fields(
        "memberId string, groupInstanceId string 3+, clientId string, clientHost string, rebalanceTimeout int32 1+, "
        "sessionTimeout int32, subscription bytes, assignment bytes"
    ),
)  # fmt: skip
_TOPICS = _fields(
    "topicId uuid, topicName string, numPartitions int32, partitionMetadata []struct",
    partitionMetadata=_fields("partition int32, racks []string"),
)
_CLASSIC_MEMBER = _fields(
    "sessionTimeoutMs int32, supportedProtocols []struct",
    supportedProtocols=_fields("name string, metadata bytes"),
)
_GROUP_MEMBER = Schema(
    (0, 0),
    0,
    (
        *_fields(
            "instanceId string, rackId string, clientId string, clientHost string, subscribedTopicNames []string, "
            "subscribedTopicRegex string, rebalanceTimeoutMs int32, serverAssignor string"
        ),
        Field("classicMemberMetadata", "struct", fields=_CLASSIC_MEMBER, tag=0),
    ),
)
_CURRENT_ASSIGNMENT = _schema(
    0, 0, 0,
    "memberEpoch int32, previousMemberEpoch int32, state int8, assignedPartitions []struct, "
    "partitionsPendingRevocation []struct",
    assignedPartitions=_TOPIC_PARTITIONS,
    partitionsPendingRevocation=_TOPIC_PARTITIONS,
)  # fmt: skip
_GROUP_KEY, _MEMBER_KEY = "groupId string", "groupId string, memberId string"
GROUP_RECORDS: Final[dict[int, tuple[Schema, Schema]]] = {
    0: (_schema(0, 0, _NEVER, _OFFSET_KEY), _OFFSET_VALUE),
    1: (_schema(1, 1, _NEVER, _OFFSET_KEY), _OFFSET_VALUE),
    2: (_schema(2, 2, _NEVER, "group string"), _GROUP_VALUE),
    3: (_schema(3, 3, _NEVER, _GROUP_KEY), _schema(0, 0, 0, "epoch int32")),
    4: (_schema(4, 4, _NEVER, _GROUP_KEY), _schema(0, 0, 0, "topics []struct", topics=_TOPICS)),
    5: (_schema(5, 5, _NEVER, _MEMBER_KEY), _GROUP_MEMBER),
    6: (_schema(6, 6, _NEVER, _GROUP_KEY), _schema(0, 0, 0, "assignmentEpoch int32")),
    7: (
        _schema(7, 7, _NEVER, _MEMBER_KEY),
        _schema(0, 0, 0, "topicPartitions []struct", topicPartitions=_TOPIC_PARTITIONS),
    ),
    8: (_schema(8, 8, _NEVER, _MEMBER_KEY), _CURRENT_ASSIGNMENT),
}
TRANSACTION_KEY: Final = _schema(0, 0, _NEVER, "transactionalId string")
TRANSACTION_VALUE: Final = _schema(
    0, 1, 1,
    "producerId int64, producerEpoch int16, transactionTimeoutMs int32, transactionStatus int8, "
    "transactionPartitions []struct, transactionLastUpdateTimestampMs int64, transactionStartTimestampMs int64",
    transactionPartitions=_fields("topic string, partitionIds []int32"),
)  # fmt: skip
_VOTERS = _fields(
    "voterId int32, voterDirectoryId uuid, endpoints []struct, kRaftVersionFeature struct",
    endpoints=_fields("name string, host string, port uint16"),
    kRaftVersionFeature=_fields("minSupportedVersion int16, maxSupportedVersion int16"),
)
CONTROL_RECORDS: Final[dict[int, tuple[str, Schema]]] = {
    3: ("SnapshotHeader", _schema(0, 0, 0, "version int16, lastContainedLogTimestamp int64")),
    4: ("SnapshotFooter", _schema(0, 0, 0, "version int16")),
    5: ("KRaftVersion", _schema(0, 0, 0, "version int16, kRaftVersion int16")),
    6: ("KRaftVoters", _schema(0, 0, 0, "version int16, voters []struct", voters=_VOTERS)),
}


# -- decoders --------------------------------------------------------------------------------------

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
    """Return the decoder with that (class) name; None for text, which is decoded a column at a time."""
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
    """Return a parser from two decoders; None when both are text."""
    if key is None and value is None:
        return None
    shown_key, shown_value = key or _decoded_text, value or _decoded_text

    def parse(_: int, key: bytes | None, value: bytes | None) -> tuple[str | None, str | None]:
        return (
            None if key is None else shown_key(key),
            None if value is None else shown_value(value),
        )

    return parse


def _decoded_text(data: bytes) -> str:
    return java_text(data) or ""


def compact_json(value: Any) -> str:
    """Return JSON as the Java tool prints it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def parse_offsets_record(
    offset: int, key: bytes | None, value: bytes | None
) -> tuple[str | None, str | None]:
    """Return key and value of a record of `__consumer_offsets` as text."""
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
    """Decode consumers' subscription and assignment, which are messages; if that fails, keep the bytes."""
    for member in members:
        for name, schema in (("subscription", CONSUMER_SUBSCRIPTION), ("assignment", CONSUMER_ASSIGNMENT)):
            try:
                member[name] = read_message(base64.b64decode(member[name] or ""), schema)[1]
            except CorruptError:
                continue


def parse_transaction_record(
    offset: int, key: bytes | None, value: bytes | None
) -> tuple[str | None, str | None]:
    """Return key and value of a record of `__transaction_state` as text."""
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
