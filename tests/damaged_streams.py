"""Streams of records made by chance: sound ones, and all that can go wrong with them on the way."""

from __future__ import annotations

import random
from typing import Any

from tidegate.integrity.columns import checksum_of
from tidegate.integrity.header import ChecksumType, Stamp
from tidegate.integrity.state import Manifest, Sent

LAG = 1000


def sound_rows(streams: Any, chance: random.Random, *, early_end: bool = False) -> list[Any]:
    """Some producers' chains, interleaved, inside a push or not; its end may come too early, or again."""
    pens = [
        streams.Pen(number + 1, chance.choice(list(ChecksumType)), headers_only=chance.random() < 0.3)
        for number in range(chance.randint(1, 4))
    ]
    parts = []
    for pen in pens:
        rows = []
        for _ in range(chance.randint(1, 4)):
            pen.time = streams.NOW - chance.choice([0, 10, LAG - 1, LAG, LAG + 1, 5 * LAG])
            if not pen.flags:
                rows += pen.chain_of(chance.randint(0, 6))
            elif not rows:
                rows += pen.bare_chain_of(chance.randint(1, 12))
            else:
                rows += pen.puts(chance.randint(0, 6))
        parts.append(rows)
    sent = tuple(
        Sent(pen.guid, pen.chain, pen.sequence - 1, pen.checksum, pen.data)
        for pen in sorted(pens, key=lambda pen: pen.guid)
    )
    rows = []
    while any(parts):
        part = chance.choice([part for part in parts if part])
        rows.append(part.pop(0))
    if chance.random() < 0.6:
        driver = streams.Pen(99)
        head, tail = [driver.start(), driver.start_push()], [driver.end_push(Manifest(sent))]
        if early_end and chance.random() < 0.3:
            tail += [driver.start_push(), driver.end_push(Manifest(sent))]
        tail.append(driver.end())
        place = (
            chance.randint(len(rows) // 2, len(rows)) if early_end and chance.random() < 0.4 else len(rows)
        )
        rows = [*head, *rows[:place], *tail, *rows[place:]]
    return rows


def damaged_header(chance: random.Random, row: Any) -> Any:
    if row.stamp is None:
        return row
    data = bytearray(row.stamp.to_bytes())
    data[chance.randrange(1, 40)] ^= 1 << chance.randrange(8)
    return row._replace(stamp=Stamp.from_bytes(bytes(data)))


def data_after(streams: Any, end: Any) -> Any:
    """A data record that follows the end of its chain."""
    stamp = end.stamp._replace(kind=0, control=255, flags=0, sequence=end.stamp.sequence + 1)
    stamp = stamp._replace(crc=checksum_of(stamp, b"k", b"v"))
    return streams.Row(stamp, b"k", b"v", time=end.time)


def damage(streams: Any, chance: random.Random, rows: list[Any]) -> None:
    """One thing that goes wrong on the way."""
    at = chance.randrange(len(rows))
    row = rows[at]
    match chance.randrange(13):
        case 0:
            del rows[at]
        case 1:
            rows.insert(chance.randint(at, len(rows)), row)
        case 2:
            other = chance.randrange(len(rows))
            rows[at], rows[other] = rows[other], rows[at]
        case 3:
            rows[at] = row._replace(value=b"changed")
        case 4 | 5:
            rows[at] = damaged_header(chance, row)
        case 6:
            if row.payload:
                place = chance.randrange(len(row.payload))
                rows[at] = row._replace(payload=row.payload[:place] + b"\x05" + row.payload[place + 1 :])
        case 7:
            rows.insert(at, streams.Row(None, b"k", b"v"))
        case 8:
            rows.insert(at, streams.Pen().heartbeat())
        case 9:
            rows.insert(at, streams.Row(None, b"k", b"v", extra=(("div", b"short"),)))
        case 10:
            del rows[at : at + chance.randint(1, 8)]
        case 11:
            rows[at] = row._replace(time=chance.choice([-1, 0, streams.NOW + LAG, 2**52]))
        case 12:
            ends = [place for place, one in enumerate(rows) if one.stamp and one.stamp.is_end_of_chain]
            if ends:
                rows.insert((at := chance.choice(ends)) + 1, data_after(streams, rows[at]))
    if not rows:
        rows.append(row)
