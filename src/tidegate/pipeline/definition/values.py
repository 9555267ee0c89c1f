"""How the values of results become bytes of a topic.

| results | bytes |
|---|---|
| a serde was given | what it writes: of an object or record all its columns, else the one column there is |
| a lone `count()` | 8 bytes, big-endian, as Kafka Streams counts |
| one column of bytes called `value` | themselves, as they were read |
| anything else | a JSON object, with the columns in their declared order |

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.pipeline.definition.inferring import VALUE, described, is_object, nearest, require_writable
from tidegate.pipeline.definition.steps import Aggregate, To
from tidegate.tables.serdes.base import Bytes, Long, Serde, require_raw
from tidegate.tables.serdes.json import Json, encode_objects


@dataclass(frozen=True, eq=False)
class ValueFormat:
    """What writes the values of one sink; `column` is the only one written, or None for all of `columns`."""

    columns: tuple[str, ...]
    serde: Serde[Any] | None  # None: JSON
    column: str | None = None

    @classmethod
    def of(cls, sink: To, schema: pa.Schema, window: Aggregate | None) -> ValueFormat:
        """Choose and check; `InvalidError` names the sink and what does not fit."""
        if sink.value is not None:
            chosen = cls._given(sink, sink.value, schema)
        elif window is not None and _is_lone_count(window):
            long: Any = Long()
            chosen = cls(tuple(schema.names), long, schema.names[0])
        elif schema.names == [VALUE] and pa.types.is_binary(schema.field(0).type):
            chosen = cls((VALUE,), Bytes(), VALUE)
        else:
            chosen = cls(tuple(schema.names), None)
        chosen._try(sink, schema)
        return chosen

    @classmethod
    def _given(cls, sink: To, serde: Serde[Any], schema: pa.Schema) -> ValueFormat:
        require_raw(serde)
        if is_object(serde):
            wanted = [each.name for each in serde.arrow_type]
            for name in wanted:
                if name not in schema.names:
                    raise InvalidError(
                        f"to {sink.topic}: its value declares {name!r}, which is no column of the "
                        f"results{nearest(name, schema.names)}; they are {described(schema)}"
                    )
            return cls(tuple(wanted), serde)
        if len(schema.names) != 1:
            raise InvalidError(
                f"to {sink.topic}: {serde!r} writes one column, and the results have {len(schema.names)} "
                f"({described(schema)}); select one, or leave value= out for JSON"
            )
        return cls(tuple(schema.names), serde, schema.names[0])

    def encode(self, values: pa.RecordBatch) -> pa.BinaryArray:
        """The values of these rows; none is null, unless its one column is."""
        if self.serde is None:
            return encode_objects(values)
        if self.column is not None:
            return self.serde.encode_column(values.column(values.schema.get_field_index(self.column)))
        chosen = values.select(list(self.columns))
        return self.serde.encode_column(
            pa.StructArray.from_arrays(chosen.columns, fields=list(chosen.schema))
        )

    def read_serde(self, schema: pa.Schema) -> Serde[Any] | None:
        """What a table over the topic would be given to read these values; None where JSON cannot say a type."""
        if self.serde is not None:
            return self.serde
        try:
            return Json(**{each.name: each.type for each in schema})
        except (InvalidError, TypeError):
            return None

    def __repr__(self) -> str:
        if self.serde is None:
            return f"JSON of {', '.join(self.columns)}"
        return repr(self.serde) if self.column is None else f"{self.column} as {self.serde.name}"

    def _try(self, sink: To, schema: pa.Schema) -> None:
        for each in schema if self.serde is None else ():
            if _has_binary(each.type):
                raise InvalidError(
                    f"to {sink.topic}: {each.name} is {each.type}, which JSON cannot say; select it as text, like "
                    f"hex({each.name}) or base64({each.name}), or give a serde as value="
                )
        try:
            if self.serde is not None and self.column is not None:
                require_writable(self.serde, schema.field(self.column).type)
            self.encode(
                pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
            )
        except (
            TypeError,
            InvalidError,
            pa.ArrowInvalid,
            pa.ArrowNotImplementedError,
            pa.ArrowKeyError,
        ) as error:
            raise InvalidError(
                f"to {sink.topic}: results of {described(schema)} cannot be written by {self!r}: {error}"
            ) from None


def _is_lone_count(window: Aggregate) -> bool:
    only = window.aggregates[0]
    return len(window.aggregates) == 1 and only.kind == "count" and not only.columns


def _has_binary(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_binary(kind.field(place).type) for place in range(kind.num_fields))
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )
