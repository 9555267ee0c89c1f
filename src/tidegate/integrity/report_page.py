"""An audit as one self-contained HTML file without scripts or external resources, for light and dark mode, and phones.

Owns the page's structure, text and style; the two reports provide the numbers. Everything from outside (names, paths,
messages) goes through `_text`, which escapes markup and non-printing characters, so that no name can become markup or
change the reading direction. Findings are listed as in the reports: the first hundred of each kind, and the number of
further ones.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from tidegate.integrity.report import BY_METADATA, AuditReport, PartitionAudit, Tally, percent
from tidegate.integrity.verdicts import FATAL, Verdict
from tidegate.log.verify.findings import Finding, Findings, Severity
from tidegate.log.verify.verify import Report

# -- style -----------------------------------------------------------------------------------------

STYLE: Final = """
:root { --ink: #1d2730; --pale: #5b6771; --line: #e1e6ea; --paper: #ffffff; --band: #f5f7f9;
  --good: #1f7a4d; --good-back: #e7f5ed; --bad: #b3261e; --bad-back: #fdecea;
  --unsure: #8a5a00; --unsure-back: #fdf3df; --bar: #2f6f9f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8edf2; --pale: #9aa7b3; --line: #2b343d; --paper: #14191f; --band: #1a2128;
    --good: #7bd3a4; --good-back: #15302a; --bad: #ff9b91; --bad-back: #3a1b1a;
    --unsure: #f2c46d; --unsure-back: #352a14; --bar: #5aa2d6; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; line-height: 1.25; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
header p { margin: .2rem 0 1rem; color: var(--pale); }
code { font: .92em ui-monospace, monospace; }
.health { font-size: 1.1rem; font-weight: 600; padding: .9rem 1.1rem; border-radius: .5rem; margin: 0;
  border-left: .35rem solid; }
.health.good { color: var(--good); background: var(--good-back); }
.health.bad { color: var(--bad); background: var(--bad-back); }
.health.unsure { color: var(--unsure); background: var(--unsure-back); }
.shares { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1rem 2rem; }
.share { display: grid; grid-template-columns: 1fr auto; gap: .2rem 1rem; align-content: start; }
.share .said { color: var(--pale); font-variant-numeric: tabular-nums; }
.share .bar { grid-column: 1 / -1; height: .55rem; border-radius: .3rem; background: var(--line); overflow: hidden; }
.share .bar i { display: block; height: 100%; background: var(--bar); }
.share .evidence { grid-column: 1 / -1; color: var(--pale); font-size: .9em; }
.table { overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem; }
table { border-collapse: collapse; width: 100%; font-size: .93em; overflow-wrap: normal; }
th, td { text-align: left; padding: .4rem .7rem; vertical-align: top; }
th { color: var(--pale); font-weight: 600; border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--line); }
tbody tr:nth-child(even) { background: var(--band); }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; } td.none { color: var(--pale); }
td.wrong { color: var(--bad); font-weight: 600; }
td[data-label="producer"] { font: .9em ui-monospace, monospace; min-width: 12em; overflow-wrap: anywhere; }
td[data-label="reason"], td[data-label="to know"], td[data-label="first offsets"] {
  min-width: 12rem; overflow-wrap: anywhere; }
ol { padding: 0; margin: 0; list-style: none; display: grid; gap: .6rem; }
ol > li { border: 1px solid var(--line); border-left: .3rem solid var(--unsure); border-radius: .5rem;
  padding: .6rem .9rem; }
ol > li.fault { border-left-color: var(--bad); } ol > li.fault b { color: var(--bad); }
ol p { margin: .3rem 0 0; } .severity { color: var(--pale); } .place { display: block; font-size: .93em; }
ol p:last-child { color: var(--pale); }
ul { margin: 0; padding-left: 1.2rem; } summary { cursor: pointer; margin-top: .6rem; }
@media (max-width: 44rem) {
  body { margin: 1rem auto; }
  .table { border: 0; overflow: visible; } thead { position: absolute; left: -9999px; }
  table, tbody, tr, td { display: block; }
  tr { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; margin-bottom: .7rem; }
  tr.bad { border-left: .3rem solid var(--bad); }
  tbody tr + tr td { border-top: 0; }
  td, td.number { display: flex; justify-content: space-between; gap: 1rem; padding: .15rem 0; text-align: right; }
  td[data-label] { min-width: 0; }
  td::before { content: attr(data-label); flex: none; color: var(--pale); font: 400 .93rem system-ui, sans-serif; }
  td.none { display: none; }
}
@media print { body { margin: 0; max-width: none; } ol > li, tr { break-inside: avoid; } }
"""


# -- page ------------------------------------------------------------------------------------------

MOST_ROWS: Final = 1000
"""Producers in the table; those with the most faults come first where there are more."""
_WORDY: Final = frozenset(
    {"partition", "producer", "offsets", "first offsets", "reason", "compacted", "to know"}
)
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_SHOWN: Final = (
    Verdict.OK,
    Verdict.DUPLICATE,
    Verdict.MISSING,
    Verdict.CORRUPT,
    Verdict.UNREGISTERED_PRODUCER,
    Verdict.AFTER_END,
    Verdict.UNSUPPORTED,
)
_WORDS: Final = {
    Verdict.UNREGISTERED_PRODUCER: "unregistered",
    Verdict.AFTER_END: "after end",
}


def page(
    report: Report,
    integrity: AuditReport | None,
    *,
    where: str,
    now_ms: int,
    interrupted: bool = False,
) -> str:
    """Return the HTML; `integrity` is None where the metadata was not read, `where` is the audited path or topic."""
    findings = report.all_findings()
    mood, sentence = health(report, integrity, findings, interrupted=interrupted)
    when = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = [
        f"<header><h1>Audit of {_text(where)}</h1><p>{when}</p></header>",
        f'<p class="health {mood}"><span aria-hidden="true">{_MARKS[mood]}</span> {_text(sentence)}</p>',
        _shares(report, integrity),
        _producers(integrity) if integrity is not None else "",
        _expected(integrity) if integrity is not None else "",
        _findings("Found by integrity metadata", findings, metadata=True),
        _findings("Found by native evidence", findings, metadata=False),
        _notes(findings),
        _partitions(report, integrity),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Audit of {_text(where)}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def health(
    report: Report, integrity: AuditReport | None, findings: Findings, *, interrupted: bool = False
) -> tuple[str, str]:
    """The overall result (`good`, `unsure` or `bad`), and a sentence that states it."""
    place = _counted(len(report.partitions), "partition")
    records = _counted(report.records, "record")
    tail = " The audit was interrupted: not all was read." if interrupted else ""
    if findings.faults:
        kinds: Counter[str] = Counter()
        for (kind, severity), count in findings.counts.items():
            kinds[kind] += count if severity is Severity.FAULT else 0
        told = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common() if count)
        return "bad", f"{_counted(findings.faults, 'fault')} in {records} of {place}: {told}.{tail}"
    if interrupted:
        return "unsure", f"No fault found so far in {records} of {place}.{tail}"
    if not report.records:
        return "unsure", f"There are no records to check in {place}."
    unread = [] if integrity is None else [each for each in integrity.partitions if each.unread is not None]
    if unread:
        return (
            "unsure",
            f"No fault found, but {_counted(len(unread), 'partition')} of {place} could not be read.",
        )
    if integrity is None or not integrity.managed:
        why = "was not read" if integrity is None else "is on none of them"
        return "good", f"Nothing wrong found in {records} of {place}; integrity metadata {why}."
    share = percent(integrity.managed, integrity.records)
    if integrity.doubts:
        return "unsure", f"No fault found in {records} of {place}, but {integrity.doubts[0]}."
    return (
        "good",
        f"Nothing wrong found in {records} of {place}; {share} were checked by their integrity metadata.",
    )


# -- sections --------------------------------------------------------------------------------------

_MARKS: Final = {"good": "✓", "unsure": "?", "bad": "✕"}


def _shares(report: Report, integrity: AuditReport | None) -> str:
    rows = [_share("by producer sequence", report.records_checked, report.records, report.evidence)]
    if integrity is None:
        rows.insert(0, _share("by integrity metadata", 0, 0, "integrity metadata was not read"))
    else:
        rows.insert(
            0, _share("by integrity metadata", integrity.managed, integrity.records, integrity.evidence)
        )
    return f'<section><h2>Records checked</h2><div class="shares">{"".join(rows)}</div></section>'


def _share(name: str, part: int, whole: int, evidence: str) -> str:
    width = 100 * part / whole if whole else 0
    said = f"{percent(part, whole) if part else '0 %'} · {part:,} of {whole:,}" if whole else "none"
    return (
        f'<div class="share"><div class="name">{name}</div><div class="said">{said}</div>'
        f'<div class="bar" aria-hidden="true"><i style="width:{width:.2f}%"></i></div>'
        f'<div class="evidence">{_text(evidence)}</div></div>'
    )


def _producers(integrity: AuditReport) -> str:
    found = [
        (f"{partition.topic}-{partition.partition}", name, tally)
        for partition in integrity.partitions
        for name, tally in partition.producers.items()
    ]
    if not found:
        return ""
    chosen, note = found, ""
    if len(found) > MOST_ROWS:
        chosen = sorted(found, key=lambda row: -row[2].faults)[:MOST_ROWS]
        note = f"<p>{len(found):,} producers; here are the {MOST_ROWS:,} with the most faults.</p>"
    rows = [
        (
            [place, name, tally.records, *(tally.verdicts[verdict] for verdict in _SHOWN), _firsts(tally)],
            tally,
        )
        for place, name, tally in chosen
    ]
    columns = ("partition", "producer", "records", *(_word(verdict) for verdict in _SHOWN), "first offsets")
    lines = [_row(columns, cells, "bad" if tally.faults else "") for cells, tally in rows]
    return f"<section><h2>Partitions and producers</h2>{note}{_table(columns, lines)}</section>"


def _firsts(tally: Tally) -> str:
    """The first offsets of verdicts other than OK, as text."""
    return "; ".join(
        f"{_word(verdict)} {', '.join(map(str, offsets))}{', …' if tally.verdicts[verdict] > len(offsets) else ''}"
        for verdict, offsets in sorted(tally.first.items())
        if offsets
    )


def _expected(integrity: AuditReport) -> str:
    columns = ("partition", "gaps", "first offsets", "reason")
    rows = [
        _row(columns, [_place(partition), gaps.count, ", ".join(map(str, gaps.first)), gaps.reason], "")
        for partition in integrity.partitions
        for gaps in partition.expected
    ]
    return f"<section><h2>Expected gaps</h2>{_table(columns, rows)}</section>" if rows else ""


def _findings(title: str, findings: Findings, *, metadata: bool) -> str:
    """The faults and warnings of one kind of evidence."""
    chosen = [
        found
        for found in findings.kept
        if found.severity is not Severity.NOTICE and found.message.startswith(BY_METADATA) == metadata
    ]
    if not chosen:
        return ""
    return f"<section><h2>{title}</h2><ol>{''.join(map(_finding, chosen))}</ol></section>"


def _finding(found: Finding) -> str:
    place = [("file", f"{found.path.parent.name}/{found.path.name}")]
    place += [
        (name, str(value))
        for name, value in (
            ("position", found.position),
            ("offset", found.offset),
            ("producer", found.producer),
        )
        if value is not None
    ]
    told = " ".join(f"{name} <code>{_text(value)}</code>" for name, value in place)
    return (
        f'<li class="{found.severity.value}"><b>{_text(found.kind)}</b> '
        f'<span class="severity">{found.severity.value}</span> <span class="place">{told}</span>'
        f"<p>{_text(found.message.removeprefix(BY_METADATA))}</p><p>→ {_text(found.remedy)}</p></li>"
    )


def _notes(findings: Findings) -> str:
    """The notices, and the number of findings not listed."""
    told = Counter((found.kind, found.severity) for found in findings.kept)
    lines = [
        f"{count:,} {kind} ({severity.value})"
        + (f", {count - told[kind, severity]:,} of them only counted" if count > told[kind, severity] else "")
        for (kind, severity), count in sorted(findings.counts.items(), key=lambda item: item[0][0])
    ]
    notices = [
        f"{found.kind} at {found.path.parent.name}/{found.path.name} offset {found.offset}: {found.message}"
        for found in findings.kept
        if found.severity is Severity.NOTICE
    ]
    if not lines:
        return ""
    shown = f"<section><h2>All findings, counted</h2>{_list(lines)}"
    if notices:
        shown += f"<details><summary>{_counted(len(notices), 'notice')}</summary>{_list(notices)}</details>"
    return shown + "</section>"


def _partitions(report: Report, integrity: AuditReport | None) -> str:
    columns = (
        "partition",
        "records",
        "with metadata",
        "segments",
        "offsets",
        "compacted",
        "faults",
        "to know",
    )
    audits = {} if integrity is None else {_place(each): each for each in integrity.partitions}
    rows = []
    for partition in report.partitions:
        place = str(partition.target.place)
        audit = audits.get(place)
        offsets = (
            "" if partition.first_offset is None else f"{partition.first_offset}…{partition.next_offset}"
        )
        cells = [
            place,
            partition.records,
            "" if audit is None else audit.managed,
            partition.segments,
            offsets,
            partition.compaction.value,
            partition.findings.faults,
            "; ".join(_to_know(audit)) if audit is not None else "",
        ]
        rows.append(_row(columns, cells, "bad" if partition.findings.faults else ""))
    return f"<section><h2>Partitions</h2>{_table(columns, rows)}</section>" if rows else ""


def _to_know(audit: PartitionAudit) -> Iterable[str]:
    if audit.unread is not None:
        yield f"not read: {audit.unread}"
    if audit.open_chains:
        yield f"{_counted(audit.open_chains, 'chain')} without an end yet: loss behind them would not show"
    for offset, resumed in audit.skipped:
        end = "its end" if resumed is None else f"offset {resumed}"
        yield f"damage from offset {offset} to {end} could not be read"
    if audit.total.records:
        yield audit.compaction


# -- markup ----------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col" class="{_alignment(name)}">{_text(name)}</th>' for name in columns)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(columns: Sequence[str], cells: Sequence[object], mood: str) -> str:
    """A table row; each cell carries its column's name, for narrow screens."""
    shown = []
    for name, cell in zip(columns, cells, strict=True):
        kind = _alignment(name)
        kind += " none" if cell in (0, "") else ""
        kind += " wrong" if isinstance(cell, int) and cell and name in _WRONG else ""
        text = f"{cell:,}" if isinstance(cell, int) else _text(str(cell))
        shown.append(f'<td data-label="{_text(name)}" class="{kind.strip()}">{text}</td>')
    return f'<tr class="{mood}">{"".join(shown)}</tr>'


def _alignment(column: str) -> str:
    return "" if column in _WORDY else "number"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _word(verdict: Verdict) -> str:
    return _WORDS.get(verdict, verdict.label)


_WRONG: Final = frozenset({_word(verdict) for verdict in FATAL} | {"faults"})


def _place(audit: PartitionAudit) -> str:
    return f"{audit.topic}-{audit.partition}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _text(raw: str) -> str:
    """Escape for text and quoted attributes: markup, and non-printing characters by their code."""
    printed = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in raw
    )
    return escape(printed, quote=True)
