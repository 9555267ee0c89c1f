"""R-25 in a memory cgroup: one window of lists that is larger than memory is spilled or refused, never an OOM kill.

A process of its own runs an app in a group of 512 MiB with a ceiling of 448 MiB. Where no group can be made, its
anonymous memory is measured instead and held to the same ceiling.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1]
sys.path.insert(0, str(SUPPORT))
from large_windows import CEILING, MIB  # noqa: E402
from memory_cgroup import Ended, run_limited  # noqa: E402

GROUP = 512 * MIB
RECORDS = 1_500_000
MANY = 10_000_000
PLAYS = [
    ("collect", "table"), ("collect", "topic"), ("collect", "rounds"), ("collect", "close"), ("distinct", "topic")
]  # fmt: skip
MORE = [("distinct", "table"), ("distinct", "close"), ("top", "topic"), ("count", "topic")]


def child(folder: Path, *words: str) -> list[str]:
    return [sys.executable, str(SUPPORT / "large_windows.py"), str(folder), *words]


@pytest.fixture(scope="module")
def many_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hot")
    subprocess.run(child(folder, "make", str(RECORDS)), check=True)
    return folder


def played(folder: Path, kind: str, target: str) -> Ended:
    ended = run_limited(child(folder, "run", kind, target), GROUP)
    assert ended.code == 0, ended
    assert ended.oom_kills in (0, None), ended
    assert ended.peak_bytes <= CEILING, f"{ended.peak_bytes / MIB:.0f} MiB: {ended}"
    return ended


def refused(output: str) -> bool:
    """Whether the run says which window, and which setting."""
    named = "window of key b'hot' from 2026-01-01T00:00:00Z" in output and "memory_ceiling_bytes" in output
    assert named == ("refused window_state" in output), output
    return named


@pytest.mark.parametrize(("kind", "target"), PLAYS)
def test_R_25_a_window_of_lists_larger_than_memory_is_refused_and_named(
    kind: str, target: str, many_records: Path, tally: Any
) -> None:
    ended = played(many_records, kind, target)
    # A table takes the window in, in pieces on disk; what must merge all of it is told that it cannot.
    assert ended.output.startswith("ran") == (target == "table"), ended
    assert refused(ended.output), ended
    if target == "table":
        assert "row k10 1500 1500" in ended.output, "other keys of the same bucket are read"
    tally(1, detected=1, peak_mib=ended.peak_bytes // MIB, oom_kills=ended.oom_kills)


def test_R_25_with_a_higher_ceiling_the_same_window_is_read(many_records: Path) -> None:
    """The way out that the refusal names."""
    played(many_records, "collect", "table")
    ended = subprocess.run(
        child(many_records, "run", "collect", "table", str(1536 * MIB)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"row hot {9 * RECORDS // 10} {9 * RECORDS // 10}" in ended.stdout, ended


@pytest.mark.soak
def test_R_25_ten_million_records_of_hot_keys(tmp_path: Path, tally: Any) -> None:
    subprocess.run(child(tmp_path, "make", str(MANY)), check=True)
    peaks: dict[str, int] = {}
    told = 0
    for kind, target in [*PLAYS, *MORE]:
        ended = played(tmp_path, kind, target)
        told += refused(ended.output)
        peaks[f"{kind}-{target}"] = ended.peak_bytes // MIB
        print(kind, target, peaks[f"{kind}-{target}"], "MiB of", CEILING // MIB, ended.output[:90])
    tally(len(peaks), detected=told, ceiling_mib=CEILING // MIB, group_mib=GROUP // MIB, peaks_mib=peaks)


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "group"), [("local", GROUP), ("spark", 4 * GROUP)])
def test_the_whole_demo_in_a_cgroup(tmp_path: Path, engine: str, group: int) -> None:
    """Without Spark in 512 MiB. A JVM alone takes more than that, so with Spark the group has room for it."""
    command = [sys.executable, "-m", "tidegate.cli.main", "demo", "--engine", engine]
    ended = run_limited([*command, "--folder", str(tmp_path / "demo")], group)
    assert ended.code == 0, ended
    assert ended.oom_kills in (0, None)
    programs = {name: f"{nbytes // MIB} MiB" for name, nbytes in sorted(ended.programs.items())}
    print(f"demo on {engine}: {ended.peak_bytes // MIB} MiB of {group // MIB} MiB at most; {programs}")
