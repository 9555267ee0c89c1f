"""Our dump beside the one Kafka's own tool printed for the same files: equal, line for line."""

from __future__ import annotations

from pathlib import Path

import pytest
from dumping import comparable, our_dump
from java_dump import dumpable
from kafka_home import FIXTURES
from recorded import answers, manifest, names, questions, unpack


@pytest.mark.parametrize(
    ("part", "topic", "question"),
    [(part, topic, question) for part in ("folders", "restarts") for topic, question in questions(part)],
)
def test_our_dump_is_kafkas_dump(
    part: str, topic: str, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = FIXTURES / part
    monkeypatch.chdir(root)
    files = dumpable(root / f"{topic}-0")
    if question == "bytes":
        files = [name for name in files if name.endswith(".log")]
    out, err = our_dump(root, files, manifest()["questions"][question])
    wanted_out, wanted_err = answers(part, topic, question)
    assert comparable(out) == comparable(wanted_out)
    assert err.splitlines() == wanted_err.splitlines()


@pytest.mark.parametrize("name", [name for name in names("pairs") if manifest()["pairs"][name]["dump"]])
def test_our_dump_of_a_damaged_log_is_kafkas_dump(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = unpack("pairs", name, tmp_path) / "before"
    monkeypatch.chdir(root)
    files = [file for file in dumpable(root / f"{name}-0") if file.endswith(".log")]
    out, err = our_dump(root, files, ["--print-data-log"])
    assert out.split("\n") == (tmp_path / "data.out").read_bytes().decode().split("\n")
    assert err.splitlines() == (tmp_path / "data.err").read_text().splitlines()


@pytest.mark.parametrize("name", names("cleaning"))
def test_our_dump_of_a_cleaned_log_is_kafkas_dump(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = unpack("cleaning", name, tmp_path)
    for stage in range(len(manifest()["cleaning"][name]["stages"])):
        root = stages / str(stage)
        monkeypatch.chdir(root)
        out, err = our_dump(root, dumpable(root / f"{name}-0"), ["--print-data-log"])
        assert comparable(out) == comparable((stages / f"{stage}.out").read_bytes().decode())
        assert sorted(err.splitlines()) == sorted((stages / f"{stage}.err").read_text().splitlines())
