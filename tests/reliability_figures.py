"""What the tests of numbered promises (`R-…`) came to, as figures: `build/reliability.json` and one line at the end.

A test of a promise takes the fixture `tally` and says how many cases it went through and how they ended: as if nothing
had happened (ok), mended (repaired), or stopped with a typed error that names what is wrong (detected). Anything else
is forbidden, and so is a test that fails. A test without a tally counts as one case. The number of the promise is in
the test's id or name.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

PLACE = Path("build") / "reliability.json"
_PROPERTY = "reliability"
_ROW = re.compile(r"(?:^|[\[_:+-])R[-_]?(\d+)(?![\d])")


@dataclass
class Figures:
    """One promise: cases = ok + repaired + detected, and none forbidden."""

    cases: int = 0
    ok: int = 0
    repaired: int = 0
    detected: int = 0
    forbidden: int = 0
    tests: list[dict[str, Any]] = field(default_factory=list)


class Tally:
    """What a test reports of its cases; options (seeds, counts, what was measured) go into the file with them."""

    def __init__(self, node: pytest.Item) -> None:
        self._node = node

    def __call__(self, cases: int, *, repaired: int = 0, detected: int = 0, **options: Any) -> None:
        ok = cases - repaired - detected
        if ok < 0:
            raise ValueError(f"{cases} cases cannot be {repaired} repaired and {detected} detected ones")
        counts = {"cases": cases, "ok": ok, "repaired": repaired, "detected": detected}
        self._node.user_properties.append((_PROPERTY, counts | {"options": options}))


class Recorder:
    """Collects the figures of a run, also of one that is spread over several processes."""

    def __init__(self) -> None:
        self.rows: dict[str, Figures] = {}

    def note(self, report: pytest.TestReport) -> None:
        found = None if report.nodeid.startswith("tests/tidy/") else _ROW.search(report.nodeid)
        if found is None or not (report.when == "call" or report.failed) or report.skipped:
            return
        row = self.rows.setdefault(f"R-{found[1]}", Figures())
        told = [value for name, value in report.user_properties if name == _PROPERTY]
        one = {"cases": 1, "ok": 1, "repaired": 0, "detected": 0}
        if report.failed:
            told = [*told, dict.fromkeys(one, 0) | {"cases": 1}]
            row.forbidden += 1
        for each in told or [one]:
            row.cases += each["cases"]
            row.ok += each["ok"]
            row.repaired += each["repaired"]
            row.detected += each["detected"]
            row.tests.append({"test": report.nodeid, "seconds": round(report.duration, 2), **each})

    def write(self, root: Path) -> str:
        """Write the file; the line that says what is in it."""
        rows = dict(sorted(self.rows.items(), key=lambda each: int(each[0][2:])))
        place = root / PLACE
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps({row: asdict(each) for row, each in rows.items()}, indent=1) + "\n")

        def total(name: str) -> int:
            return sum(getattr(each, name) for each in rows.values())

        each_row = ", ".join(f"{row} {figures.cases:,}" for row, figures in rows.items())
        return (
            f"reliability: {each_row}; cases {total('cases'):,} = ok {total('ok'):,} + repaired {total('repaired'):,} "
            f"+ detected {total('detected'):,}; forbidden {total('forbidden')} ({PLACE})"
        )
