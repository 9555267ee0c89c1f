"""The audit over folders that a real broker wrote, crashed in, and cleaned: no false alarm, every damage seen."""

from __future__ import annotations

import pytest
from kafka_home import FIXTURES
from recorded import manifest, names, unpack

from tidegate.log.verify.verify import verify

HARMLESS = {"open-transaction", "head", "restart", "duplicate"}

# What was done to a folder before it was recorded, and what the audit must call it. Nothing: no finding but
# notices. `tail` and missing indexes are warnings, everything else here is a fault.
DAMAGE = {
    "flip-first-batch": "corrupt",
    "flip-first-segment": "corrupt",
    "flip-last-batch": "corrupt",
    "flip-second-to-last": "corrupt",
    "below-recovery-point-flip": "corrupt",
    "recovery-point-0-flip": "corrupt",
    "length-10": "corrupt",
    "length-48": "corrupt",
    "length-huge": "corrupt",
    "length-negative": "corrupt",
    "magic-3": "corrupt",
    "start-beyond-end": "corrupt",
    "base-offset-far": "offset-gap",
    "base-offset-overflow": "offset",
    "middle-log-empty": "missing",
    "active-log-empty": "index",
    "index-junk": "index",
    "time-index-junk": "index",
    "indexes-two-bytes": "index",
    "below-recovery-point-index-junk": "index",
    "transactions-index-gone": "index",
    "clean-snapshot-corrupt": "snapshot",
    "snapshot-torn": "snapshot",
    "snapshot-zeros": "snapshot",
    "later-leader-epoch": "leader-epoch",
    "base-offset-repeated": "offset",
    "clean-flip": "corrupt",
    "clean-index-junk": "index",
    "clean-index-seven-bytes": "index",
    "middle-segment-gone": "offset-gap",
    "preallocated": "tail",
    "several-bad-batches": "corrupt",
    "snapshot-empty": "snapshot",
    "transactions-index-junk": "index",
}
SOUND = ("clean", "unmarked", "killed", "swap-complete", "deleted-leftovers", "snapshots-gone", "epochs-gone")


def counts(folder) -> dict[str, int]:
    return {
        kind: count
        for kind, count in verify(str(folder), log=folder.parent).as_dict()["counts"].items()
        if kind not in HARMLESS
    }


@pytest.mark.parametrize("part", ["folders", "restarts"])
def test_what_a_broker_wrote_is_sound(part):
    for topic in names(part):
        found = counts(FIXTURES / part / f"{topic}-0")
        # This topic's producer was made to begin just before the sequence wraps: to the audit its start is lost.
        assert found == ({"missing": 1} if topic == "idempotent" else {}), topic


@pytest.mark.parametrize("name", names("cleaning"))
def test_what_a_broker_cleaned_is_sound(name, tmp_path):
    stages = unpack("cleaning", name, tmp_path)
    for stage in range(len(manifest()["cleaning"][name]["stages"])):
        assert counts(stages / str(stage) / f"{name}-0") == {}, stage


@pytest.mark.parametrize("name", names("pairs"))
def test_damage_that_a_broker_met_is_named(name, tmp_path):
    found = counts(unpack("pairs", name, tmp_path) / "before" / f"{name}-0")
    if name in DAMAGE:
        assert DAMAGE[name] in found
    elif "torn" in name or "tail" in name or "zeros" in name or name == "recovery-point-beyond-end":
        assert "tail" in found
    elif name in SOUND:
        assert found == {}
