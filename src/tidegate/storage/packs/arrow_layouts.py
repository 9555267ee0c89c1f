"""How Arrow lays arrays out in memory, as far as packs store them: by type, which buffers there are and how wide.

Thread rule: pure, but for what is remembered of types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.storage.packs.steps import INTEGERS


def layout_of(kind: pa.DataType) -> str | None:
    """How arrays of the type lie; its number alone decides, and is much quicker to ask for."""
    number = kind.id
    if number not in _LAYOUTS:
        _LAYOUTS[number] = _find_layout(kind)
    return _LAYOUTS[number]


_LAYOUTS: dict[int, str | None] = {}


PLAIN: dict[int, tuple[int, np.dtype[Any] | None, bool]] = {
    # by the type's number: the width and kind of the numbers in the second buffer, and whether those are offsets
    **{number: (numbers.itemsize, numbers, False) for number, numbers in INTEGERS.items()},
    pa.float64().id: (8, None, False),
    pa.binary().id: (4, np.dtype(np.int32), True),
}


def _find_layout(kind: pa.DataType) -> str | None:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType) or types.is_union(kind) or types.is_run_end_encoded(kind):
        return None
    if types.is_null(kind):
        return "null"
    if types.is_boolean(kind):
        return "bits"
    if (
        types.is_binary(kind)
        or types.is_string(kind)
        or types.is_large_binary(kind)
        or types.is_large_string(kind)
    ):
        return "binary"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return "list"
    if types.is_fixed_size_list(kind):
        return "fixed_list"
    if types.is_struct(kind):
        return "struct"
    if types.is_dictionary(kind) or types.is_fixed_size_binary(kind) or types.is_primitive(kind):
        return "fixed"
    return "fixed" if types.is_decimal(kind) else None


def fixed_width(kind: pa.DataType) -> int:
    return int((kind.index_type if pa.types.is_dictionary(kind) else kind).bit_width // 8)


def is_large(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_large_binary(kind) or types.is_large_string(kind) or types.is_large_list(kind))


def element_of(kind: pa.DataType) -> pa.DataType:
    return pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type


def types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    if isinstance(kind, pa.BaseExtensionType):
        return
    if pa.types.is_dictionary(kind):
        yield from types_in(kind.value_type)
    else:
        for index in range(kind.num_fields):
            yield from types_in(kind.field(index).type)
