"""Compare an app's definition with the recorded one: which changes existing state can follow, and with what effect.

Flows are matched by name (the name of their first output). Stores keep the widths and columns they were created with.

| change | existing state |
|---|---|
| none, or the order of flows | kept |
| a new flow | starts where its source says |
| a removed flow | stays stored and is not updated |
| another output (topic, table) | kept; applies to new results |
| another format of values | kept if the topic has no records yet (`recovery`) |
| `validate`, `on_error`, `start`, late table, future guard, idle close, code of a function | applies from now on |
| longer grace, retention or deduplication horizon | kept; what was final, late or dropped stays so |
| aggregates appended at the end | kept; existing windows count them for new records only |
| any step of a flow without state | nothing to keep; applies from now on |
| windows over changes (`emit="update"`): grace, more aggregates | refused: rows cannot be retracted |
| one more field of JSON values | kept, unless whole records wait behind a `key_by` or rows of changes are stored |
| one field less that no state uses | kept, unless whole records are stored |
| anything else | refused, with the remedies |

A user-defined reducer cannot be appended: its state for zero records is unknown.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from tidegate.durations import format_duration
from tidegate.errors import CorruptError, InvalidError
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.topology import LAYOUTS, Aggregate, Dedupe, Document, without_code
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.layout import StateLayout

_STATEFUL = {"deduplicate": "drop_duplicates", "aggregate": "agg"}  # as recorded: as users write them


@dataclass(frozen=True)
class Change:
    """One difference of one flow: what it is, and its effect on results or why it is refused."""

    flow: str
    is_compatible: bool
    what: str
    means: str

    def __str__(self) -> str:
        return f"{self.flow}: {self.what}: {self.means}"


class _Differences:
    """Compares the recorded document of one flow with the current one; `found` are the differences."""

    def __init__(self, flow: str, old: Document, new: Document) -> None:
        self._flow, self._old, self._new = flow, old, new
        self._is_stateful = _keeps_state(old) or _keeps_state(new)
        self.found: list[Change] = []
        self._source(old["source"], new["source"])
        self._sinks()
        self._validation()
        was, now = _plain_steps(old), _plain_steps(new)
        if not self._is_stateful:
            if without_code(was) != without_code(now):
                means = "there is no state; records from the next round on go through the new ones"
                self._accept("its steps changed", means)
        elif [step["step"] for step in was] != [step["step"] for step in now]:
            said = f"its steps were {_listed(was)} and are {_listed(now)}"
            self._refuse(said, "state was made by the old ones and would be continued by others")
        else:
            for before, after in zip(was, now, strict=True):
                if without_code(before) != without_code(after):
                    self._step(before, after)
        if without_code([was, old["sinks"]]) == without_code([now, new["sinks"]]) and was != now:
            means = "records from the next round on go through the new code, earlier results stay"
            self._accept("the code of a function changed (or Python did)", means)

    def _accept(self, what: str, means: str) -> None:
        self.found.append(Change(self._flow, True, what, means))

    def _refuse(self, what: str, means: str) -> None:
        self.found.append(Change(self._flow, False, what, means))

    # -- source and sinks ------------------------------------------------------------------------

    def _source(self, was: Document, now: Document) -> None:
        for field in ("topic", "windows"):
            if was[field] != now[field]:
                said = f"its source's {field} was {was[field]} and is {now[field]}"
                self._refuse(said, "offsets and state belong to what was read before")
        is_told = self._fields()
        for field in ("key", "value", "timestamp"):
            if was[field] == now[field] or (field == "value" and is_told):
                continue
            if self._is_stateful:
                self._refuse(f"how it reads {field} changed", "state was made of the columns of before")
            else:
                self._accept(f"how it reads {field} changed", "records from the next round on are read so")
        self._emitted(was, now)
        if was["start"] != now["start"]:
            means = "nothing: only a new flow begins there, this one goes on where it is"
            self._accept(f"start was {was['start']} and is {now['start']}", means)
        if was["on_bad"] != now["on_bad"]:
            before, after = ("drop" if each["on_bad"] == "skip" else each["on_bad"] for each in (was, now))
            means = "values that cannot be read are treated so from now on"
            self._accept(f"on_error was {before} and is {after}", means)

    def _fields(self) -> bool:
        """Compare the fields of JSON values in a flow that keeps state; return whether they are what changed."""
        was, now = _json_fields(self._old), _json_fields(self._new)
        if was is None or now is None or was == now or not self._is_stateful:
            return False
        for each in sorted(was.keys() & now.keys()):
            if was[each] != now[each]:
                self._refuse(
                    f"field {each} was {was[each]} and is {now[each]}",
                    f"{_listed_states(self._new)} made of values of the old type; declare it as it was, and a new "
                    "field beside it",
                )
        whole = _whole_rows(self._new)
        stores = [store for store in whole if not store.startswith("the late table")]
        for each in sorted(now.keys() - was.keys()):
            if stores:
                self._refuse(
                    f"field {each} is new",
                    f"{' and '.join(stores)} whole records with the fields of before. A .select(…) in front keeps them "
                    "apart from such changes, from a replay on",
                )
            else:
                means = (
                    "records from the next round on have it; what is kept of records before has null for it"
                )
                self._accept(f"field {each} is new", means)
        for each in sorted(was.keys() - now.keys()):
            said = f"field {each} is not declared any more"
            if whole:
                self._refuse(said, f"{' and '.join(whole)} whole records with it; declare it on")
            else:
                self._accept(said, "it is not read any more, and no state is made of it")
        return True

    def _emitted(self, was: Document, now: Document) -> None:
        """Compare how a changelog that is read was written; earlier releases did not record it, and added up every
        change."""
        before, after = was.get("emit"), now.get("emit")
        if before != after:
            read = "plain records" if before is None else f"emit={before!r}"
            said = f"its source is read as emit={after!r}, and was as {read}"
            if (after == "close" and before is None) or not self._is_stateful:
                self._accept(said, "changes are read so from now on")
            else:
                means = "what is kept does not know what rows were before, so their changes could not be taken back"
                self._refuse(said, means)
            return
        if before == "update":
            self._retracted()
        lengths = was.get("settles_ms", 0), now.get("settles_ms", 0)
        if lengths[0] != lengths[1]:
            said = f"how long its source's windows may change was {lengths[0]} ms and is {lengths[1]} ms"
            self._accept(said, "late changes are judged so from now on")

    def _retracted(self) -> None:
        """Refuse changes that state of records can follow, and state of retractable rows cannot."""
        before, after = _first(self._old, "aggregate"), _first(self._new, "aggregate")
        if before is None or after is None:
            return
        if len(after["aggregates"]) > len(before["aggregates"]):
            means = "of rows that were added before, it would take back what it never had; a replay makes it"
            self._refuse("an aggregate over changes is new", means)
        if before["kind"].get("grace_ms") != after["kind"].get("grace_ms"):
            means = "rows of windows that were final are not kept, so their changes could not be taken back"
            self._refuse("the grace of windows over changes is another", means)

    def _sinks(self) -> None:
        before, after = ({_end_name(end): end for end in each["sinks"]} for each in (self._old, self._new))
        for end in sorted(after.keys() - before.keys()):
            means = "changes from now on are sent there; windows of before when they change"
            self._accept(f"it also goes to {end}", means)
        for end in sorted(before.keys() - after.keys()):
            self._accept(f"it does not go to {end} any more", "what is there stays")
        for end in sorted(before.keys() & after.keys()):
            old, new = before[end], after[end]
            fields = [field for field in new if old.get(field) != new[field]]
            changed = f"{' and '.join(fields)} of {end} changed"
            if old["step"] != new["step"]:
                means = "readers of the one would not find the other; give it another name"
                self._refuse(f"{end} was a {old['step']} and is a {new['step']}", means)
            elif "partitions" in fields or "key_format" in fields:
                means = "keys of before and of now would not meet in one table; send it to another topic"
                self._refuse(changed, means)
            elif old != new:
                means = "records are written so from now on, and those of before stay as they are"
                self._accept(changed, means)

    # -- steps -----------------------------------------------------------------------------------

    def _validation(self) -> None:
        before, after = _first(self._old, "validate"), _first(self._new, "validate")
        if before == after:
            return
        if before is None:
            self._accept("it validates", "producers are followed from here on, as they are found")
        elif after is None:
            self._accept("it does not validate any more", "faults of producers are not seen from here on")
        else:
            said = ", ".join(
                f"{each} was {before.get(each, 'not said')} and is {after.get(each, 'not said')}"
                for each in {**before, **after}
                if before.get(each) != after.get(each)
            )
            self._accept(said, "faults are treated so from now on")

    def _step(self, was: Document, now: Document) -> None:
        """Compare a step with the one of its kind in the same place, in a flow that keeps state."""
        match was["step"]:
            case "deduplicate":
                self._dedupe(was, now)
            case "aggregate":
                self._aggregate(was, now)
            case "key_by" if was["shards"] != now["shards"]:
                means = "each key's state lies in the task that its shard is; the number stays for life"
                self._refuse(f"key_by's shards were {was['shards']} and are {now['shards']}", means)
            case other:
                means = (
                    "state was made of records chosen or made by the old one; results would mean two things"
                )
                self._refuse(f"its {other} changed", means)

    def _dedupe(self, was: Document, now: Document) -> None:
        if was["columns"] != now["columns"]:
            said = f"drop_duplicates was by {was['columns']} and is by {now['columns']}"
            self._refuse(said, "the ids that are kept are of the old columns")
        for field, means in (
            (
                "within_ms",
                "copies are looked for as far back as ids were kept, and so far once that time has passed",
            ),
            ("grace_ms", "records of a time that was late before stay late, because their ids are gone"),
        ):
            self._length("drop_duplicates's", field, was, now, means)
        for field in ("late", "refresh"):
            if was[field] != now[field]:
                said = f"drop_duplicates's {field} was {was[field]} and is {now[field]}"
                self._accept(said, "records are judged so from now on")
        self._late(was["keep_late"], now["keep_late"])

    def _aggregate(self, was: Document, now: Document) -> None:
        old, new = dict(was["kind"]), dict(now["kind"])
        for field in ("grace_ms", "retention_ms"):
            if field in old and field in new and old["kind"] == new["kind"]:
                means = "windows stay open or readable longer; what was final or dropped stays so"
                self._length("the window's", field, old, new, means)
            old.pop(field, None), new.pop(field, None)
        if old != new:
            said = f"the window was {_window(old)} and is {_window(new)}"
            self._refuse(said, "the windows that are kept have other bounds")
        self._columns(was["aggregates"], now["aggregates"])
        if was["emit"] != now["emit"]:
            said = f"emit was {was['emit']} and is {now['emit']}"
            self._refuse(said, "which windows were sent as final is not known for the other one")
        if was.get("compat") != now.get("compat"):
            said = f"compat was {was.get('compat')!r} and is {now.get('compat')!r}"
            self._refuse(said, "the windows that are kept were made by the other rules")
        for field in ("future", "idle_close_ms"):
            if was[field] != now[field]:
                self._accept(f"{field.removesuffix('_ms')} changed", "records are judged so from now on")
        self._late(was["keep_late"], now["keep_late"])

    def _columns(self, was: Sequence[Document], now: Sequence[Document]) -> None:
        before, after = without_code(list(was)), without_code(list(now))
        if before == after:
            return
        if before == after[: len(before)]:
            for each in now[len(was) :]:
                self._appended(each)
            return
        old, new = ({each["name"]: each for each in given} for given in (before, after))
        for each in sorted(new.keys() - old.keys()):
            means = "those there were changed too, or do not come first; append new ones at the end"
            self._refuse(f"aggregate {each} is new", means)
        for each in sorted(old.keys() - new.keys()):
            self._refuse(f"aggregate {each} is not there any more", "states are stored whole, with it")
        for each in sorted(old.keys() & new.keys()):
            if old[each] != new[each]:
                self._refuse(f"aggregate {each} is made otherwise", "its state was made the old way")
        if old == new:
            self._refuse("aggregates stand in another order", "states are stored in the old one")

    def _appended(self, added: Document) -> None:
        said, lone = f"aggregate {added['name']} is new", _lone_counts(self._old)
        if added["kind"] == "reduce":
            self._refuse(said, "only its own functions know its state of no record; a replay makes it")
        elif lone:
            self._refuse(
                said,
                f"values of {', '.join(lone)} are 8-byte counts, and would become JSON; send the new results to "
                "another topic",
            )
        else:
            self._accept(said, "windows there are have it for records from now on, new ones for all")

    def _late(self, before: Any, after: Any) -> None:
        if before == after:
            return
        if before is None:
            self._accept("late records are kept", "from now on")
        elif after is None:
            self._accept("late records are not kept any more", "those of before are not gone on with")
        else:
            self._accept("how long and how many late records are kept changed", "from now on")

    def _length(self, whose: str, field: str, was: Document, now: Document, means: str) -> None:
        """Compare a duration: longer is accepted, shorter would drop what others still rely on."""
        before, after = was[field], now[field]
        name = f"{whose} {field.removesuffix('_ms')}"
        said = f"{name} was {format_duration(before)} and is {format_duration(after)}"
        if after > before:
            self._accept(said, means)
        elif after < before:
            self._refuse(said, "a shorter one would drop what can still be read, or close what is still open")


def _plain_steps(document: Document) -> list[Document]:
    return [step for step in document["steps"] if step["step"] != "validate"]


def _first(document: Document, kind: str) -> Document | None:
    return next((step for step in document["steps"] if step["step"] == kind), None)


def _keeps_state(document: Document) -> bool:
    return any(step["step"] in _STATEFUL for step in document["steps"])


def added_fields(old: Document, new: Document) -> tuple[str, ...]:
    """Return the fields of JSON values that were not declared before."""
    was, now = _json_fields(old), _json_fields(new)
    return () if was is None or now is None else tuple(sorted(now.keys() - was.keys()))


def declares_anew(steps: Sequence[Document]) -> bool:
    """Whether one of these steps redefines all columns, whatever columns came before it."""
    return any(step["step"] in ("select", "map") for step in steps)


def _json_fields(said: Document) -> dict[str, str] | None:
    value = said["source"]["value"]
    if not isinstance(value, dict) or not value.get("json"):
        return None
    return {name: str(kind) for name, kind in value["json"]}


def _whole_rows(said: Document) -> list[str]:
    """Describe the stores of a flow that keep whole records as declared."""
    steps, found = said["steps"], []
    rekeyed = next(
        (
            place
            for place, step in enumerate(steps)
            if step["step"] == "key_by" and any(each["step"] in _STATEFUL for each in steps[place:])
        ),
        None,
    )
    window = _first(said, "aggregate")
    is_ordered = rekeyed is not None and (
        _first(said, "deduplicate") is not None
        or (
            window is not None
            and (
                window["kind"]["kind"] == "session"
                or any(each["kind"] == "reduce" for each in window["aggregates"])
            )
        )
    )
    if is_ordered and not declares_anew(steps[: rekeyed or 0]):
        found.append("the store of records that wait behind key_by for other partitions holds")
    for place, step in enumerate(steps):
        if step["step"] not in _STATEFUL or declares_anew(steps[:place]):
            continue
        if step["step"] == "aggregate" and said["source"].get("emit") == "update":
            found.append("the store of rows whose changes are taken back holds")
        if step["keep_late"] is not None:
            found.append(f"the late table of {_STATEFUL[step['step']]} holds")
    return found


def _listed_states(said: Document) -> str:
    kept = [_STATEFUL[step["step"]] for step in said["steps"] if step["step"] in _STATEFUL]
    return f"the state of {kept[0]} was" if len(kept) == 1 else f"states of {' and '.join(kept)} were"


def _end_name(end: Document) -> str:
    return str(end["topic"] if end["step"] == "to" else end["name"])


def _lone_counts(document: Document) -> list[str]:
    """Topics with 8-byte values, because a count is the only aggregate."""
    last = document["steps"][-1] if document["steps"] else None
    if last is None or last["step"] != "aggregate" or len(last["aggregates"]) != 1:
        return []
    only = last["aggregates"][0]
    if only["kind"] != "count" or only["columns"]:
        return []
    return [end["topic"] for end in document["sinks"] if end["step"] == "to" and end["value"] is None]


def _listed(steps: Sequence[Document]) -> str:
    return ", ".join(step["step"] for step in steps) or "none"


def _window(kind: Document) -> str:
    name, lengths = kind["kind"], {field: value for field, value in kind.items() if field != "kind"}
    if name == "hopping" and lengths["size_ms"] == lengths["advance_ms"]:
        name = "tumbling"
        del lengths["advance_ms"]
    said = [f"{field.removesuffix('_ms')} {format_duration(value)}" for field, value in lengths.items()]
    return f"{name} ({', '.join(said)})"


# -- changes --------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["same", "compatible", "incompatible"]
_WAYS_OUT = (
    "Change it back; or give the app another name, which starts anew beside this one; or let it begin anew with "
    "`tidegate app reset {app}`; or compute everything again from the log with `tidegate app replay {app}`. Where "
    "other windows or values are sent now, send them to another topic, too: a topic holds one encoding."
)


@dataclass(frozen=True)
class Changes:
    """All differences; `flows` are those to run, with the store layouts of existing state.

    `fresh` flows start from nothing, `removed` ones are not continued.
    """

    changes: tuple[Change, ...]
    flows: tuple[Flow, ...]
    fresh: frozenset[str]
    removed: frozenset[str]

    @property
    def kind(self) -> Kind:
        if not self.changes:
            return "same"
        return "compatible" if all(each.is_compatible for each in self.changes) else "incompatible"

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence per difference, refused ones first."""
        return tuple(str(each) for each in sorted(self.changes, key=lambda each: each.is_compatible))

    def require(self, app: str) -> None:
        """Raise `InvalidError` with the refused differences and the remedies."""
        wrong = [str(each) for each in self.changes if not each.is_compatible]
        if wrong:
            raise InvalidError(
                f"app {app} was changed in a way its state cannot follow:\n- "
                + "\n- ".join(wrong)
                + "\n"
                + _WAYS_OUT.format(app=app)
            )


def compare(recorded: Mapping[str, bytes], flows: Sequence[Flow]) -> Changes:
    """Compare the recorded descriptions, by flow, with the current flows."""
    found: list[Change] = []
    to_run: list[Flow] = []
    fresh: list[str] = []
    for flow in flows:
        before = recorded.get(flow.name)
        if before is None:
            fresh.append(flow.name)
            to_run.append(flow)
            start = "the beginning" if flow.source.start == "earliest" else "the end"
            means = f"it reads {flow.source.topic} from {start} of the log on"
            found.append(Change(flow.name, True, "is new", means))
            continue
        described = _decoded(flow.name, before)
        found += _Differences(flow.name, described, flow.document).found
        to_run.append(_laid_out(flow, described))
    removed = frozenset(recorded) - {flow.name for flow in flows}
    for name in sorted(removed):
        means = "its state and results stay as they are, and nothing is added to them"
        found.append(Change(name, True, "is not said any more", means))
    return Changes(tuple(found), tuple(to_run), frozenset(fresh), removed)


def as_recorded(flow: Flow, description: bytes) -> Flow:
    """Return the flow with its stores laid out as recorded: what a reader of committed state needs."""
    return _laid_out(flow, _decoded(flow.name, description))


def _decoded(name: str, description: bytes) -> Document:
    try:
        said: Document = msgspec.json.decode(description, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"the recorded definition of flow {name} cannot be read: {error}", kafka_name=None
        ) from None
    return said


def _laid_out(flow: Flow, recorded: Document) -> Flow:
    """Return the flow with the existing store layouts, where they differ from those it would choose."""
    steps = list(flow.steps)
    added = added_fields(recorded, flow.document)
    for place, name in flow.operators.items():
        step, laid = steps[place], recorded.get(LAYOUTS, {}).get(name)
        if laid is None or not isinstance(step, Aggregate | Dedupe):
            continue
        grown_from = sorted({*laid.get("grown_from", ()), *_fewer_aggregates(recorded, step)})
        layout = StateLayout(laid["bucket_ms"], laid["segment_ms"], tuple(grown_from))
        late, segment_ms = step.late, laid.get("late_segment_ms")
        if late is not None and segment_ms is not None:
            lacking = _lacking(laid, added if not declares_anew(flow.document["steps"][:place]) else ())
            late = LateSettings(format_duration(late.retention_ms), late.max_bytes, segment_ms, lacking)
        steps[place] = replace(step, layout=layout, late=late)
    laid_out = Flow(flow.source, tuple(steps), flow.sinks)
    return flow if laid_out.document == flow.document else laid_out


def _lacking(laid: Document, added: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """For each earlier column set of a late table, return the current columns that it lacks."""
    before = [sorted({*names, *added}) for names in laid.get("late_lacking", ())]
    return tuple(tuple(names) for names in [*before, *([sorted(added)] if added else [])])


def _fewer_aggregates(recorded: Document, step: Aggregate | Dedupe) -> list[int]:
    """Return the earlier number of aggregates, if there are more now."""
    before = [len(each["aggregates"]) for each in recorded["steps"] if each["step"] == "aggregate"]
    return [count for count in before if isinstance(step, Aggregate) and count < len(step.aggregates)]
