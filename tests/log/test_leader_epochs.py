"""Leader epochs: which were assigned from where, where one ended, and their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.checkpoints import LeaderEpochs

THREE = [(2, 6), (3, 8), (4, 11)]


def epochs_at(folder: Path, *, files: Files | None = None) -> LeaderEpochs:
    return LeaderEpochs(folder / "leader-epoch-checkpoint", files=files or Files())


def filled(folder: Path, *entries: tuple[int, int]) -> LeaderEpochs:
    epochs = epochs_at(folder)
    for epoch, start_offset in entries:
        epochs.assign(epoch, start_offset)
    return epochs


def same_after_reopening(folder: Path, epochs: LeaderEpochs) -> bool:
    return epochs_at(folder).entries == epochs.entries


@pytest.mark.parametrize(
    ("start_offset", "expected"),
    [
        pytest.param(8, [(3, 8), (4, 11)], id="LS-E1-start-8"),
        pytest.param(9, [(3, 9), (4, 11)], id="LS-E1-start-9"),
        pytest.param(1, THREE, id="LS-E1-start-early"),
        pytest.param(6, THREE, id="LS-E1-start-first"),
        pytest.param(11, [(4, 11)], id="LS-E1-start-last"),
        pytest.param(15, [(4, 15)], id="LS-E1-start-behind"),
        pytest.param(-1, THREE, id="LS-E1-start-undefined"),
    ],
)
def test_trimming_the_start_rewrites_the_epoch_that_covers_it(
    tmp_path: Path, start_offset: int, expected: list[tuple[int, int]]
) -> None:
    epochs = filled(tmp_path, *THREE)
    epochs.truncate_from_start(start_offset)
    assert list(epochs.entries) == expected
    assert same_after_reopening(tmp_path, epochs)


@pytest.mark.parametrize(
    ("end_offset", "expected"),
    [
        pytest.param(9, [(2, 6), (3, 8)], id="LS-E1-end-9"),
        pytest.param(8, [(2, 6)], id="LS-E1-end-8"),
        pytest.param(12, THREE, id="LS-E1-end-behind"),
        pytest.param(0, [], id="LS-E1-end-all"),
        pytest.param(-1, THREE, id="LS-E1-end-undefined"),
    ],
)
def test_trimming_the_end_drops_epochs_that_start_there(
    tmp_path: Path, end_offset: int, expected: list[tuple[int, int]]
) -> None:
    epochs = filled(tmp_path, *THREE)
    epochs.truncate_from_end(end_offset)
    assert list(epochs.entries) == expected
    assert same_after_reopening(tmp_path, epochs)


@pytest.mark.parametrize(
    ("entry", "expected", "news"),
    [
        pytest.param((4, 11), THREE, False, id="LS-E2-same"),
        pytest.param((4, 99), THREE, False, id="LS-E2-higher-start"),
        pytest.param((4, 10), [(2, 6), (3, 8), (4, 10)], True, id="LS-E2-lower-start"),
        pytest.param((4, 8), [(2, 6), (4, 8)], True, id="LS-E2-start-of-earlier"),
        pytest.param((3, 20), [(2, 6), (3, 20)], True, id="LS-E2-lower-epoch"),
        pytest.param((1, 7), [(1, 7)], True, id="LS-E2-lowest-epoch"),
        pytest.param((9, 6), [(9, 6)], True, id="LS-E2-first-start"),
        pytest.param((5, 11), [(2, 6), (3, 8), (5, 11)], True, id="LS-E2-empty-epoch"),
        pytest.param((5, 12), [*THREE, (5, 12)], True, id="LS-E2-next"),
    ],
)
def test_an_assigned_epoch_drops_what_contradicts_it(
    tmp_path: Path, entry: tuple[int, int], expected: list[tuple[int, int]], news: bool
) -> None:
    epochs = filled(tmp_path, *THREE)
    assert epochs.assign(*entry) is news
    assert list(epochs.entries) == expected
    assert epochs.latest == expected[-1] and epochs.earliest == expected[0]
    assert same_after_reopening(tmp_path, epochs)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        pytest.param(6, (6, 100), id="LS-E3-latest"),
        pytest.param(2, (2, 13), id="LS-E3-known"),
        pytest.param(3, (2, 13), id="LS-E3-between"),
        pytest.param(4, (4, 17), id="LS-E3-before-latest"),
        pytest.param(5, (4, 17), id="LS-E3-below-latest"),
        pytest.param(1, (1, 11), id="LS-E3-unknown-lower"),
        pytest.param(7, (-1, -1), id="LS-E3-higher-than-all"),
        pytest.param(-1, (-1, -1), id="LS-E3-undefined"),
    ],
)
def test_the_end_of_an_epoch_is_the_start_of_the_next(
    tmp_path: Path, asked: int, expected: tuple[int, int]
) -> None:
    assert filled(tmp_path, (2, 11), (4, 13), (6, 17)).end_offset_for(asked, 100) == expected


def test_an_empty_history_knows_nothing(tmp_path: Path) -> None:
    epochs = epochs_at(tmp_path)
    assert (epochs.latest, epochs.earliest, epochs.entries) == (None, None, ())
    assert epochs.end_offset_for(0, 5) == (-1, -1)
    epochs.truncate_from_start(7)
    epochs.truncate_from_end(0)
    assert not any(tmp_path.iterdir()), "nothing to say, nothing written"


def test_the_file_has_the_published_bytes(tmp_path: Path) -> None:
    path = filled(tmp_path, (0, 0)).path
    assert path.read_bytes() == b"0\n1\n0 0\n"
    filled(tmp_path, (7, 4000000000))
    assert path.read_bytes() == b"0\n2\n0 0\n7 4000000000\n"


def test_clearing_leaves_an_empty_file(tmp_path: Path) -> None:
    epochs = filled(tmp_path, *THREE)
    epochs.clear()
    assert epochs.path.read_bytes() == b"0\n0\n"
    assert epochs_at(tmp_path).entries == ()


@pytest.mark.parametrize("entry", [(-1, 5), (0, -1)])
def test_an_impossible_epoch_is_refused(tmp_path: Path, entry: tuple[int, int]) -> None:
    with pytest.raises(InvalidError):
        epochs_at(tmp_path).assign(*entry)


def test_a_file_out_of_order_is_read_as_if_assigned_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "leader-epoch-checkpoint").write_bytes(b"0\n4\n1 0\n2 10\n5 8\n3 20\n")
    assert list(epochs_at(tmp_path).entries) == [(1, 0), (3, 20)]


@pytest.mark.parametrize(
    "text",
    [b"1\n0\n", b"0\n1\n", b"0\n1\n0\n", b"0\n1\n-1 0\n", b"0\n1\n0 x\n", b"0\n1\n2147483648 0\n", b"\0\0"],
)
def test_a_damaged_file_is_a_typed_error_and_can_be_started_anew(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "leader-epoch-checkpoint"
    path.write_bytes(text)
    with pytest.raises(CorruptError) as caught:
        epochs_at(tmp_path)
    assert caught.value.path == path
    epochs = LeaderEpochs(path, files=Files(), ignore_file=True)
    assert path.read_bytes() == text
    epochs.assign(3, 5)
    assert list(epochs_at(tmp_path).entries) == [(3, 5)]


def test_an_epoch_whose_write_failed_is_not_taken_for_known(tmp_path: Path) -> None:
    broken = [True]

    def watch(effect: Effect) -> None:
        if effect.kind == "sync" and broken[0]:
            raise UnavailableError("sync failed")

    epochs = epochs_at(tmp_path, files=Files(watch))
    with pytest.raises(UnavailableError):
        epochs.assign(0, 0)
    assert epochs.latest is None
    broken[0] = False
    assert epochs.assign(0, 0)
    assert same_after_reopening(tmp_path, epochs)


def test_appending_in_the_same_epoch_writes_nothing(tmp_path: Path) -> None:
    kinds: list[str] = []
    epochs = epochs_at(tmp_path, files=Files(lambda effect: kinds.append(effect.kind)))
    epochs.assign(0, 0)
    kinds.clear()
    for offset in range(1, 50):
        epochs.assign(0, offset)
    assert not kinds
