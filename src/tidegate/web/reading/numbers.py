"""What each number of a document is: measured, and by which metric, or something that is not measured at all.

Every number that a page shows is a field of its document, and every such field says one of these; the OpenAPI document
says the same, as `x-metric` and `x-number`. What is measured has a metric of the same value at `/metrics`
(`measuring`).
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec


def metric(name: str) -> msgspec.Meta:
    """For a field that is measured: the metric that says the same."""
    return msgspec.Meta(extra_json_schema={"x-metric": name})


KINDS: Final = {
    "name": "tells things apart: a partition, a round, a commit, a chain",
    "offset": "where a record lies",
    "moment": "when something was or will be, in epoch milliseconds",
    "setting": "what somebody set: a limit, an interval, a window's width",
    "answer": "how much was found for the very question that was asked",
    "detail": "of one thing among many: a record's size, how late it was, a log segment's bytes",
    "share": "a part of a whole; the parts are measured",
    "age": "how long ago a moment is that is measured",
}
"""What a number is that is not measured."""


def _is(kind: str) -> msgspec.Meta:
    return msgspec.Meta(extra_json_schema={"x-number": kind})


Name: TypeAlias = Annotated[int, _is("name")]
Offset: TypeAlias = Annotated[int, _is("offset")]
Moment: TypeAlias = Annotated[int, _is("moment")]
Setting: TypeAlias = Annotated[int, _is("setting")]
Answer: TypeAlias = Annotated[int, _is("answer")]
Detail: TypeAlias = Annotated[int, _is("detail")]
Share: TypeAlias = Annotated[float, _is("share")]
Age: TypeAlias = Annotated[int, _is("age")]

Backlog: TypeAlias = Annotated[int, metric("tidegate_backlog_bytes")]
Committed: TypeAlias = Annotated[int, metric("tidegate_committed_seconds")]
Faults: TypeAlias = Annotated[int, metric("tidegate_app_faults_total")]
Lag: TypeAlias = Annotated[int, metric("tidegate_lag_records")]
Late: TypeAlias = Annotated[int, metric("tidegate_late_total")]
LateRecords: TypeAlias = Annotated[int, metric("tidegate_table_late_records")]
LogBytes: TypeAlias = Annotated[int, metric("tidegate_log_bytes")]
LogRecords: TypeAlias = Annotated[int, metric("tidegate_log_records")]
LogSegments: TypeAlias = Annotated[int, metric("tidegate_log_segments")]
Memory: TypeAlias = Annotated[int, metric("tidegate_memory_bytes")]
RecordsRead: TypeAlias = Annotated[int, metric("tidegate_app_records_total")]
Rounds: TypeAlias = Annotated[int, metric("tidegate_rounds_total")]
Stopped: TypeAlias = Annotated[int, metric("tidegate_stopped_partitions")]
StreamTime: TypeAlias = Annotated[int, metric("tidegate_watermark_seconds")]
