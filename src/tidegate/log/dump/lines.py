"""Record lines of the dump, a whole window at a time: columns are joined into one block of text by Arrow.

A line per record would cost a Python object per field; here every field is one Arrow column of strings, the
join of all columns is one array, and the characters of that array, end to end, are the text. The batch lines
stand in front of their first record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.log.dump.batches import BatchRun
from tidegate.log.dump.decoders import RecordParser
from tidegate.log.dump.records import RecordColumns
from tidegate.log.format.batch import LOG_APPEND_TIME_BIT


def record_lines(
    run: BatchRun,
    records: RecordColumns,
    batch_lines: Sequence[str],
    tails: Sequence[Any],
    *,
    size_words: tuple[str, str],
) -> str:
    """Batch and record lines of a run; `tails` are columns that end each record's line."""
    headers: Any = "[]"
    if records.header_keys is not None:
        joined = pc.binary_join(records.header_keys, ",").cast(pa.large_string())
        headers = _join("[", joined, "]")
    return _joined(
        records,
        batch_lines,
        "| offset: ",
        _digits(records.offsets),
        " ",
        _labels(run, records),
        ": ",
        _digits(records.timestamps),
        f" {size_words[0]}: ",
        _digits(records.key_sizes),
        f" {size_words[1]}: ",
        _digits(records.value_sizes),
        " sequence: ",
        _digits(records.sequences),
        " headerKeys: ",
        headers,
        *tails,
    )


def bare_lines(records: RecordColumns, batch_lines: Sequence[str], tails: Sequence[Any]) -> str:
    """Batch lines and, for each record, nothing but its tails."""
    return _joined(records, batch_lines, *(tails or ("",)))


def contents(records: RecordColumns, parser: RecordParser | None) -> tuple[Any, Any]:
    """Keys and values as columns of text, null where there is none to show."""
    if parser is None:
        return records.text_column("key"), records.text_column("value")
    pairs = [
        parser(*row)
        for row in zip(
            records.offsets.tolist(), records.bytes_of("key"), records.bytes_of("value"), strict=True
        )
    ]
    return (
        pa.array([pair[0] for pair in pairs], pa.large_string()),
        pa.array([pair[1] for pair in pairs], pa.large_string()),
    )


def labelled(label: str, column: Any) -> Any:
    """`label` and the text; nothing at all where the text is null."""
    return pc.coalesce(_join(label, column), _word(""))


def column_of(texts: Mapping[int, str], length: int) -> Any:
    """A column of these texts, empty elsewhere."""
    empty = pa.array([""], pa.large_string()).take(pa.array(np.zeros(length, dtype=np.int64)))
    return replaced(empty, texts)


def replaced(column: Any, texts: Mapping[int, str]) -> Any:
    """The column with other texts at some rows."""
    if not texts:
        return column
    rows = np.zeros(len(column), dtype=bool)
    rows[list(texts)] = True
    ordered = [texts[row] for row in sorted(texts)]
    return pc.replace_with_mask(column, pa.array(rows), pa.array(ordered, pa.large_string()))


def _joined(records: RecordColumns, batch_lines: Sequence[str], *columns: Any) -> str:
    in_front, behind = _fronts(records, batch_lines)
    if len(records) == 0:
        return behind
    # Every line ends in a newline, so the array's characters are the text.
    lines = _join(in_front, *columns, "\n")
    offsets = np.frombuffer(lines.buffers()[1], dtype=np.int64)[lines.offset : lines.offset + len(lines) + 1]
    return str(lines.buffers()[2][offsets[0] : offsets[-1]], "utf-8") + behind


def _fronts(records: RecordColumns, batch_lines: Sequence[str]) -> tuple[Any, str]:
    """What stands in front of each record's line, and the lines of batches behind the last record."""
    fronts: dict[int, str] = {}
    behind = ""
    for start, line in zip(records.starts.tolist(), batch_lines, strict=False):
        if start < len(records):
            fronts[start] = fronts.get(start, "") + line + "\n"
        else:
            behind += line + "\n"
    return column_of(fronts, len(records)), behind


def _join(*columns: Any) -> Any:
    return pc.binary_join_element_wise(*(_word(c) if isinstance(c, str) else c for c in columns), _word(""))


def _word(text: str) -> Any:
    return pa.scalar(text, pa.large_string())


def _digits(column: Any) -> Any:
    return pc.cast(pa.array(column), pa.large_string())


def _labels(run: BatchRun, records: RecordColumns) -> Any:
    appended = (run.table.attributes & LOG_APPEND_TIME_BIT) != 0
    if not appended.any():
        return "CreateTime"
    counts = np.diff(records.starts)
    return pc.if_else(pa.array(np.repeat(appended, counts)), _word("LogAppendTime"), _word("CreateTime"))
