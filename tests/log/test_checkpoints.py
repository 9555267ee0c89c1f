"""The text files of a log folder: exact text, strict reading, nothing lost in a failed write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log import checkpoints
from tidegate.log.checkpoints import TopicId
from tidegate.randomness import SeededRandomness

FILES = Files()
OFFSETS = {("orders", 0): 109, ("orders", 10): 0, ("a-b.c_d", 2): 2**63 - 1}
TOPIC_ID = TopicId(bytes(range(16)))


def read(path: Path) -> checkpoints.Offsets:
    return checkpoints.read_offsets(path, files=FILES)


@pytest.mark.parametrize("offsets", [pytest.param(OFFSETS, id="LS-K1"), pytest.param({}, id="LS-K1-empty")])
def test_offsets_survive_a_round_trip(tmp_path: Path, offsets: checkpoints.Offsets) -> None:
    path = tmp_path / checkpoints.RECOVERY_POINTS
    checkpoints.write_offsets(path, offsets, files=FILES)
    assert read(path) == offsets
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "no temporary file is left"


def test_offset_checkpoints_have_the_text_a_broker_writes(tmp_path: Path) -> None:
    path = tmp_path / checkpoints.LOG_STARTS
    checkpoints.write_offsets(path, {("orders", 1): 7, ("orders", 0): 109}, files=FILES)
    assert path.read_bytes() == b"0\n2\norders 0 109\norders 1 7\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(None, {}, id="missing"),
        pytest.param(b"", {}, id="empty"),
        pytest.param(b"0\n", {}, id="version-only"),
        pytest.param(b"0\n0\n", {}, id="none"),
        pytest.param(b"0\n1\nt 0 5", {("t", 0): 5}, id="no-last-newline"),
        pytest.param(b"0\r\n1\r\nt 0 5\r\n", {("t", 0): 5}, id="crlf"),
        pytest.param(b"0\n1\nt  0\t5\n", {("t", 0): 5}, id="other-white-space"),
        pytest.param(b"0\n2\nt 0 5\nt 0 6\n", {("t", 0): 6}, id="last-wins"),
    ],
)
def test_what_a_broker_accepts_is_accepted(
    tmp_path: Path, text: bytes | None, expected: checkpoints.Offsets
) -> None:
    path = tmp_path / "checkpoint"
    if text is not None:
        path.write_bytes(text)
    assert read(path) == expected


@pytest.mark.parametrize(
    ("text", "position"),
    [
        pytest.param(b"1\n1\nt 0 5\n", 0, id="LS-K1-version-1"),
        pytest.param(b"x\n1\nt 0 5\n", 0, id="version-word"),
        pytest.param(b"\n1\nt 0 5\n", 0, id="version-missing"),
        pytest.param(b"0\nmany\nt 0 5\n", 2, id="count-word"),
        pytest.param(b"0\n2\nt 0 5\n", 10, id="too-few"),
        pytest.param(b"0\n0\nt 0 5\n", 10, id="too-many"),
        pytest.param(b"0\n-1\n", 5, id="negative-count"),
        pytest.param(b"0\n99999999999\n", 2, id="absurd-count"),
        pytest.param(b"0\n2147483647\nt 0 5\n", 19, id="huge-count"),
        pytest.param(b"0\n1\nt 0\n", 4, id="two-fields"),
        pytest.param(b"0\n1\nt 0 5 6\n", 4, id="four-fields"),
        pytest.param(b"0\n1\n\n", 4, id="blank-line"),
        pytest.param(b"0\n1\nt zero 5\n", 4, id="partition-word"),
        pytest.param(b"0\n1\nt -1 5\n", 4, id="negative-partition"),
        pytest.param(b"0\n1\nt 0 -5\n", 4, id="negative-offset"),
        pytest.param(b"0\n1\nt 0 1_0\n", 4, id="underscore"),
        pytest.param("0\n1\nt 0 \u0665\n".encode(), 4, id="other-digits"),
        pytest.param(b"0\n1\nt 0 " + b"9" * 5000 + b"\n", 4, id="absurd-number"),
        pytest.param(b"0\n1\nt 0 9223372036854775808\n", 4, id="beyond-int64"),
        pytest.param(b"0\n1\n\xff 0 5\n", 4, id="not-utf-8"),
        pytest.param(b"\0" * 64, 0, id="zeros"),
    ],
)
def test_a_damaged_checkpoint_is_a_typed_error_that_says_where(
    tmp_path: Path, text: bytes, position: int
) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(text)
    with pytest.raises(CorruptError) as caught:
        read(path)
    assert (caught.value.path, caught.value.position) == (path, position)
    assert len(str(caught.value)) < 400


def test_an_absurdly_long_checkpoint_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with path.open("wb") as file:
        file.truncate(checkpoints.CHECKPOINT_LIMIT_BYTES + 1)
    with pytest.raises(CorruptError, match="more than"):
        read(path)


@pytest.mark.parametrize(
    "entry", [(("", 0), 1), (("a b", 0), 1), (("a\nb", 0), 1), (("a", -1), 1), (("a", 0), -1)]
)
def test_what_could_not_be_read_back_is_not_written(
    tmp_path: Path, entry: tuple[tuple[str, int], int]
) -> None:
    with pytest.raises(InvalidError):
        checkpoints.write_offsets(tmp_path / "checkpoint", dict([entry]), files=FILES)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename"])
def test_a_failed_write_keeps_the_old_checkpoint(tmp_path: Path, kind: str) -> None:
    def watch(effect: Effect) -> None:
        if effect.kind == kind:
            raise UnavailableError(f"{kind} failed")

    path = tmp_path / "checkpoint"
    checkpoints.write_offsets(path, OFFSETS, files=FILES)
    with pytest.raises(UnavailableError):
        checkpoints.write_offsets(path, {("t", 0): 1}, files=Files(watch))
    assert read(path) == OFFSETS


@pytest.mark.parametrize(
    ("topic_id", "text"),
    [
        pytest.param(TOPIC_ID, b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw", id="LS-K1-metadata"),
        pytest.param(
            TopicId(b"\xff" * 16),
            b"version: 0\ntopic_id: _____________________w",
            id="LS-K1-metadata-url-safe",
        ),
    ],
)
def test_partition_metadata_is_two_lines_without_a_last_newline(
    tmp_path: Path, topic_id: TopicId, text: bytes
) -> None:
    checkpoints.write_topic_id(tmp_path, topic_id, files=FILES)
    assert (tmp_path / checkpoints.PARTITION_METADATA).read_bytes() == text
    assert checkpoints.read_topic_id(tmp_path, files=FILES) == topic_id


@pytest.mark.parametrize("other", [pytest.param(TopicId(bytes(15) + b"\1"), id="LS-K1-other-topic-id")])
def test_a_different_topic_id_is_rejected(tmp_path: Path, other: TopicId) -> None:
    checkpoints.write_topic_id(tmp_path, TOPIC_ID, files=FILES)
    checkpoints.write_topic_id(tmp_path, TOPIC_ID, files=FILES)
    with pytest.raises(ConflictError, match="belongs to topic id") as caught:
        checkpoints.write_topic_id(tmp_path, other, files=FILES)
    assert caught.value.kafka_name == "INCONSISTENT_TOPIC_ID"
    assert checkpoints.read_topic_id(tmp_path, files=FILES) == TOPIC_ID


def test_a_folder_without_metadata_has_no_topic_id(tmp_path: Path) -> None:
    assert checkpoints.read_topic_id(tmp_path, files=FILES) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"version: 0",
        b"version: 0\n",
        b"version: -1\ntopic_id: AAECAwQFBgcICQoLDA0ODw",
        b"version: x\ntopic_id: AAECAwQFBgcICQoLDA0ODw",
        b"version 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw",
        b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0OD",
        b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0O+w",
        b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA",
        b"version: 0\nother: AAECAwQFBgcICQoLDA0ODw",
        b"\xff\xfe",
        b"version: 0\ntopic_id: " + b"A" * 5000,
    ],
)
def test_damaged_partition_metadata_is_a_typed_error(tmp_path: Path, text: bytes) -> None:
    (tmp_path / checkpoints.PARTITION_METADATA).write_bytes(text)
    with pytest.raises(CorruptError) as caught:
        checkpoints.read_topic_id(tmp_path, files=FILES)
    assert caught.value.path == tmp_path / checkpoints.PARTITION_METADATA


def test_metadata_of_a_later_version_is_read(tmp_path: Path) -> None:
    (tmp_path / checkpoints.PARTITION_METADATA).write_bytes(
        b"version: 1\ntopic_id: AAECAwQFBgcICQoLDA0ODw\nnew: 1"
    )
    assert checkpoints.read_topic_id(tmp_path, files=FILES) == TOPIC_ID


def test_topic_ids_are_random_readable_and_never_start_with_a_dash() -> None:
    randomness = SeededRandomness(7)
    ids = [TopicId.random(randomness) for _ in range(300)]
    assert len(set(ids)) == 300
    for topic_id in ids:
        assert TopicId.parse(str(topic_id)) == topic_id
        assert len(str(topic_id)) == 22 and not str(topic_id).startswith("-")
    with pytest.raises(InvalidError):
        TopicId(b"short")
    with pytest.raises(InvalidError):
        checkpoints.write_topic_id(Path("unused"), TopicId(bytes(16)), files=FILES)


def test_the_clean_shutdown_marker_is_written_read_and_taken_away(tmp_path: Path) -> None:
    assert not checkpoints.has_clean_shutdown(tmp_path, files=FILES)
    assert not checkpoints.remove_clean_shutdown(tmp_path, files=FILES)
    checkpoints.write_clean_shutdown(tmp_path, files=FILES, broker_epoch=57)
    assert (tmp_path / ".kafka_cleanshutdown").read_bytes() == b'{"version":0,"brokerEpoch":57}'
    assert checkpoints.has_clean_shutdown(tmp_path, files=FILES)
    assert checkpoints.remove_clean_shutdown(tmp_path, files=FILES)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text", [b"", b"not json", b"\xff", b'{"version":9,"brokerEpoch":5,"more":[]}'])
def test_only_the_existence_of_the_marker_counts(tmp_path: Path, text: bytes) -> None:
    (tmp_path / checkpoints.CLEAN_SHUTDOWN).write_bytes(text)
    assert checkpoints.has_clean_shutdown(tmp_path, files=FILES)
