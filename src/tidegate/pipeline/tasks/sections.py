"""A section of a parcel as records, held against what lies in the log where it belongs.

Thread rule: pure functions.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidegate.errors import FencedError
from tidegate.log.format.batch import HEADER_SIZE, iter_headers
from tidegate.log.format.decode import decode
from tidegate.pipeline.rounds.orders import Section

COMPARED = ("key", "value", "headers")


def records_of(section: Section, batches: memoryview, base: int) -> pa.RecordBatch:
    """A section's records, with the offsets they get."""
    data, offset = bytearray(batches), base
    for position, header in iter_headers(batches):
        data[position : position + HEADER_SIZE] = header._replace(base_offset=offset).pack()
        offset += header.count
    return decode(data, topic=section.topic, partition=section.partition)


def require_ours(section: Section, base: int, ours: pa.RecordBatch, found: pa.RecordBatch) -> None:
    """Every record found at an offset of ours is the one we put there."""
    offsets = found.column("offset").to_numpy()
    inside = (offsets >= base) & (offsets < base + section.records)
    theirs = found.filter(pa.array(inside))
    require_same(section, base, theirs, ours.take(pa.array(offsets[inside] - base)))


def require_same(section: Section, base: int, theirs: pa.RecordBatch, mine: pa.RecordBatch) -> None:
    """Row by row the same records, wherever they lie."""
    for name in COMPARED:
        if not theirs.column(name).equals(mine.column(name)):
            same = np.array(
                [one.equals(other) for one, other in zip(theirs.column(name), mine.column(name), strict=True)]
            )
            at = int(theirs.column("offset")[int(np.argmin(same))].as_py())
            raise fenced(section, base, at, "another record lies there")


def fenced(section: Section, base: int, offset: int, why: str) -> FencedError:
    return FencedError(
        f"results for {section.topic}-{section.partition} belong to offsets {base} to {base + section.records - 1}, "
        f"and at offset {offset} the partition is not as this run left it: {why}. Another program writes to the topic, "
        "or another run took over: let only one of them write there, and start this one again. To have it go on behind "
        "what is there, `tidegate app rebase APP --log LOG`"
    )
