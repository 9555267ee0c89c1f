"""A column of JSON texts, one value each, to one typed Arrow column: decimals, moments, lists and structs.

Arrow converts whole columns where its rules are ours; where it refuses a column, or might read some text more
generously than declared, the values are read one by one (`json_values`). Texts come from the kernel, so each one is
valid JSON. A row that is not as declared becomes null and its reason is told.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from tidegate.tables.serdes.json_values import ZONE_NAME, Refused, as_array, beyond_unit, convert, parse

# Arrow takes digits before a point only, and the point not last; a JSON number is always like that.
_NUMBER: Final = r"^-?[0-9]+(\.[0-9]+)?$"
_DATE: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_MOMENT: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?"
    r"((Z|[+-][0-9]{2}(:?[0-9]{2})?)(\[[A-Za-z0-9_+/:-]+\])?)?$"
)
_INTEGER: Final = r"^-?(0|[1-9][0-9]{0,17})$"
_NESTED_LEAVES: Final = {pa.int64(), pa.string(), pa.bool_()}


def convert_texts(texts: pa.StringArray, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """The typed column, and the rows that are not as declared with their reasons."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), field.type), {}
    try:
        whole = _whole_column(texts, field.type)
    except pa.ArrowInvalid:
        whole = None
    return (whole, {}) if whole is not None else _row_by_row(texts, field)


def _whole_column(texts: pa.StringArray, kind: pa.DataType) -> pa.Array | None:
    """The column converted by Arrow, or None where its rules are not ours."""
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        return _nested(texts, kind) if _is_plain(kind) else None
    bare = pc.utf8_trim(texts, characters='"')
    is_quoted = pc.starts_with(texts, '"')
    if pa.types.is_decimal128(kind):
        return bare.cast(kind) if _all_match(bare, _NUMBER) else None
    if pc.all(is_quoted).as_py():
        if pa.types.is_date32(kind):
            return bare.cast(kind) if _all_match(bare, _DATE) else None
        return _moments(bare, kind) if _all_match(bare, _MOMENT) else None
    if pa.types.is_timestamp(kind) and _all_match(texts, _INTEGER):
        return texts.cast(pa.int64()).cast(kind)
    return None


def _moments(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Moments as Arrow reads them; once more without what it does not: names of zones, digits beyond the unit."""
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        plain = pc.replace_substring_regex(texts, ZONE_NAME, "")
        return pc.replace_substring_regex(plain, *beyond_unit(kind)).cast(kind)


def _all_match(texts: pa.StringArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow's JSON reader gives this type exactly what the text says, or refuses it."""
    if pa.types.is_list(kind):
        return kind.value_field.nullable and _is_plain(kind.value_type)
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return all(one.nullable and _is_plain(one.type) for one in fields)
    return kind in _NESTED_LEAVES


def _nested(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Lists and structs, through Arrow's reader of lines; line breaks inside a value are only blanks."""
    filled = pc.replace_substring(texts.fill_null("null"), "\n", " ")
    lines = pc.binary_join_element_wise('{"v":', pc.replace_substring(filled, "\r", " "), "}\n", "")
    joined = lines.buffers()[2]
    table = arrow_json.read_json(
        pa.BufferReader(joined),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=max(1, joined.size)),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=pa.schema([("v", kind)]), unexpected_field_behavior="ignore"
        ),
    )
    found = table["v"].combine_chunks()
    if len(found) != len(texts):
        raise pa.ArrowInvalid(f"{len(found)} values read from {len(texts)} texts")
    return found


def _row_by_row(texts: pa.StringArray, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    values: list[Any] = [None] * len(texts)
    refused: dict[int, str] = {}
    for row in np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False)).tolist():
        try:
            values[row] = convert(parse(texts[row].as_py().encode()), field, field.name)
        except Refused as reason:
            refused[row] = str(reason)
    return as_array(values, field.type), refused
