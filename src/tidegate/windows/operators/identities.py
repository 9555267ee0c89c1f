"""The id of a record as bytes: one column of bytes out of any plain columns, the same value the same bytes.

One column of text or bytes is its own id; one of fixed width is its bytes as Arrow has them, with one zero and one
NaN for doubles. Several columns are joined, each behind its length (u32 LE), so that ("ab", "c") and ("a", "bc") are
two ids. A record with a null in any of its columns has no id. The bytes are only hashed, and never kept.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.windows.aggregates.distinct import one_of_equals, refuse_incomparable
from tidegate.windows.keys.binary_columns import make_binary, room_for

_BINARY = pa.binary()


def check_columns(columns: Sequence[str], schema: pa.Schema) -> None:
    """Refuse columns that are not there, or whose values cannot be an id."""
    for name in columns:
        places = schema.get_all_field_indices(name)
        if len(places) != 1:
            raise InvalidError(f"deduplicate: no single column {name!r} among {schema.names}")
        type_ = schema.field(places[0]).type
        try:
            refuse_incomparable(type_.value_type if pa.types.is_dictionary(type_) else type_)
        except InvalidError as error:
            raise InvalidError(
                f"deduplicate: column {name}: {error}; the columns are {schema.names}"
            ) from None


def id_column(columns: Sequence[pa.Array]) -> pa.BinaryArray:
    """The ids of records; null where one of the columns is."""
    plain = [_as_bytes(column) for column in columns]
    if len(plain) == 1:
        return plain[0]
    parts: list[pa.Array] = []
    for column in plain:
        lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        parts += [_fixed(np.ascontiguousarray(lengths, "<i4").view(np.uint8), 4), column]
    return pc.binary_join_element_wise(*parts, b"")


def _as_bytes(column: pa.Array) -> pa.BinaryArray:
    type_ = column.type
    if pa.types.is_dictionary(type_):
        column, type_ = column.dictionary_decode(), type_.value_type
    if type_ == _BINARY:
        return column
    if pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_large_binary(type_):
        return column.cast(_BINARY)
    if pa.types.is_boolean(type_):
        column, type_ = column.cast(pa.uint8()), pa.uint8()
    if not (
        pa.types.is_primitive(type_) or pa.types.is_decimal(type_) or pa.types.is_fixed_size_binary(type_)
    ):
        raise InvalidError(f"values of type {type_} cannot be an id; cast the column to text or bytes")
    column, width = one_of_equals(column), type_.bit_width // 8
    if not len(column):
        return pa.array([], _BINARY)
    data = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width :][: len(column) * width]
    present = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    return _fixed(data, width, present)


def _fixed(
    data: np.ndarray[tuple[int], np.dtype[np.uint8]], width: int, present: object = None
) -> pa.BinaryArray:
    """Values of one width, behind each other in `data`."""
    rows = len(data) // width
    room_for(len(data), "a column of ids")
    return make_binary(np.arange(0, (rows + 1) * width, width, dtype=np.int32), data, present)  # type: ignore[arg-type]
