"""Other positions for an app's source partitions, asked for from outside: what is refused, and what its commit becomes.

A position and the state that was made up to it belong together: a position that goes back under kept state would count
records twice, and state that is dropped takes its position with it.

Thread rule: pure functions, but for reading the app's record.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidegate.errors import InvalidError
from tidegate.pipeline.rounds.orders import resume_command
from tidegate.pipeline.rounds.records import CommitRecord, Loss, Records, SourceLine


def require_not_read_again(app: str, line: SourceLine, to: int) -> None:
    """Refuse to go back under kept state; a topic that was made anew names the offset it begins at in its remedy."""
    at = line.frontier[1]
    if to >= at:
        return
    if line.stopped is not None and line.stopped.remedy == resume_command(app, line.flow, line.partition, to):
        return
    raise InvalidError(
        f"app {app}: {line.flow}:{line.partition} stopped at offset {at}, and the records before it are "
        f"in its state and results: going on at {to} would count them twice. Leave --skip-to out, or give "
        f"{at} or more; to read records again, go back to a commit with `tidegate app replay {app} "
        "--to-round N` "
        f"(`tidegate app checkpoints {app}` lists them) or compute everything again with `tidegate app replay {app}`"
    )


def from_offsets_of(
    records: Records, commit: CommitRecord, offsets: Mapping[str, Mapping[int, int]]
) -> CommitRecord:
    _check_offsets(records, commit, offsets)
    lines, losses = list[SourceLine](), list(commit.losses)
    for line in commit.sources:
        to = offsets.get(line.flow, {}).get(line.partition)
        if to is None:
            lines.append(line)
            continue
        lines.append(SourceLine(line.flow, line.partition, to, seen_ms=line.seen_ms))
        if to > line.next_offset:
            losses.append(Loss(line.flow, line.partition, line.next_offset, to, commit.round + 1))
    rekeyed = _rekeyed(records, commit)
    return msgspec.structs.replace(
        commit,
        sources=tuple(lines),
        tasks=tuple(
            line
            for line in commit.tasks
            if line.flow not in offsets or (line.flow not in rekeyed and line.task not in offsets[line.flow])
        ),
        losses=tuple(losses),
        watermarks={flow: time for flow, time in commit.watermarks.items() if flow not in offsets},
        closed=tuple(flow for flow in commit.closed if flow not in offsets),
        change="to be replayed from offsets",
    )


def _check_offsets(records: Records, commit: CommitRecord, offsets: Mapping[str, Mapping[int, int]]) -> None:
    partitions: dict[str, set[int]] = {}
    for line in commit.sources:
        partitions.setdefault(line.flow, set()).add(line.partition)
    rekeyed = _rekeyed(records, commit)
    for flow, wanted in offsets.items():
        if flow not in partitions:
            have = ", ".join(sorted(partitions))
            raise InvalidError(f"app {commit.app} has no flow {flow!r}; it has {have}")
        for number, offset in wanted.items():
            if number not in partitions[flow]:
                raise InvalidError(
                    f"app {commit.app}: flow {flow} reads partitions 0 to {max(partitions[flow])}, not {number}"
                )
            if offset < 0:
                raise InvalidError(
                    f"app {commit.app}: {flow}:{number}={offset} is no offset; it must be 0 or more"
                )
        missing = sorted(partitions[flow] - wanted.keys())
        if flow in rekeyed and missing:
            left = ", ".join(f"{flow}:{number}" for number in missing)
            raise InvalidError(
                f"app {commit.app}: flow {flow} is re-keyed, so its state is of all source partitions together and "
                f"begins empty for all of them; give offsets for {left}, too"
            )


def _rekeyed(records: Records, commit: CommitRecord) -> set[str]:
    """The flows whose state is kept behind a `key_by`."""
    found = records.load_app()
    lines = () if found is None else found[0].definitions.get(commit.definition, ())
    rekeyed = set[str]()
    for line in lines:
        steps = [step["step"] for step in msgspec.json.decode(line.description)["steps"]]
        after = steps[steps.index("key_by") :] if "key_by" in steps else []
        if "deduplicate" in after or "aggregate" in after:
            rekeyed.add(line.name)
    return rekeyed
