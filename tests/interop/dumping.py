"""Our dump, asked as Kafka's tool is asked, and both texts in a comparable shape."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tidegate.log.dump.decoders import parse_offsets_record, parse_transaction_record
from tidegate.log.dump.dump import DumpOptions, Target, dump
from tidegate.log.dump.text import TextSink

FLAGS: dict[str, dict[str, Any]] = {
    "--print-data-log": {"print_data": True},
    "--deep-iteration": {"deep": True},
    "--skip-record-metadata": {"skip_record_metadata": True},
    "--index-sanity-check": {"index_sanity_check": True},
    "--verify-index-only": {"verify_index_only": True},
    "--offsets-decoder": {"parser": parse_offsets_record},
    "--transaction-log-decoder": {"parser": parse_transaction_record},
}


def our_dump(root: Path, files: Sequence[str], options: Sequence[str]) -> tuple[str, str]:
    """Dump files named relative to the working folder `root`; standard output and standard error."""
    given: dict[str, Any] = {}
    for option, value in zip_longest(options, options[1:]):
        given |= {"max_bytes": int(value)} if option == "--max-bytes" else FLAGS.get(option, {})
    asked = DumpOptions(**given)
    out, err = io.StringIO(), io.StringIO()
    dump([Target.of(name) for name in files], asked, TextSink(asked, out, err))
    return out.getvalue(), err.getvalue().replace(f"{root.resolve()}/", "")


def comparable(text: str) -> list[str]:
    """Lines, where the producers of one snapshot (which have no order) are sorted."""
    lines: list[str] = []
    producers: list[str] = []
    for line in [*text.split("\n"), "end"]:
        if line.startswith("producerId: "):
            producers.append(line)
            continue
        lines += [*sorted(producers), line]
        producers = []
    return lines
