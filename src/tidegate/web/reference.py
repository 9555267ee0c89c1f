"""The reference page of the HTTP API, made from the questions there are: `python -m tidegate.web.reference --write`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from tidegate.web import openapi
from tidegate.web.questions import LIVE
from tidegate.web.reading import numbers
from tidegate.web.settings import Limits

PAGE: Final = Path("docs/reference/http-api.md")
_HEAD: Final = """\
# HTTP API

<!-- Made by `python -m tidegate.web.reference --write`; a test checks that it is up to date. -->

`tidegate ui` answers the same as JSON that its pages show: every screen has a link to its document. `GET` and `HEAD`
only; nothing can be changed. Times are epoch milliseconds, names and keys are text, moments in questions may be written
`2026-01-01T10:00Z`. The OpenAPI 3.1 document is at `/api/openapi.json`; `/health` answers without a token.

```sh skip
curl 'http://localhost:8421/api/tables/shop:per-minute/fetch?key=customer-7&since=2026-01-01T10:00Z'
```

A table of an app is `APP:TABLE`; a table that a process keeps over a topic has its own name. A page of rows says `next`
when there is more: give it back as `after`. A search reads at most {scan:,} records or {seconds:g} seconds, says how
far it looked, and goes on where it ended.

Every number that a page shows is a number of its document, or the length of one of its lists. The OpenAPI document says
of each field what it is: one that is measured names its metric (`x-metric`), and `/metrics` has it with the same value
([metrics](metrics.md#the-page)); any other says why it has none (`x-number`):

| `x-number` | is |
|---|---|
{kinds}
"""


def page() -> str:
    """The whole page."""
    document = openapi.document()
    limits = Limits()
    lines = [
        _HEAD.format(scan=limits.scan_records, seconds=limits.scan_seconds, kinds=_kinds()),
        "## Questions\n",
    ]
    for path, said in document["paths"].items():
        lines += _operation(path, said["get"])
    lines.append(
        "## Streams\n\nServer-sent events; each is the document of the question, whenever it has changed.\n"
    )
    lines.append("| address | gives |\n|---|---|")
    lines += [f"| `/api{each.path}` | {each.summary} |" for each in LIVE]
    lines += ["", _limits(limits), _failures()]
    return "\n".join(lines).rstrip() + "\n"


def _operation(path: str, said: dict[str, Any]) -> list[str]:
    lines = [f"### `{path}`\n", f"{said['summary']}.\n"]
    asked = [each for each in said.get("parameters", ()) if each["in"] == "query"]
    if asked:
        lines.append("| parameter | of | |\n|---|---|---|")
        for each in asked:
            needed = " (needed)" if each["required"] else ""
            lines.append(f"| `{each['name']}`{needed} | {_kind(each['schema'])} | {each['description']} |")
        lines.append("")
    return lines


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return _kind(next(each for each in schema["anyOf"] if each.get("type") != "null"))
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    bounds = [
        f"from {schema['minimum']}" if "minimum" in schema else "",
        f"to {schema['maximum']}" if "maximum" in schema else "",
    ]
    return " ".join(filter(None, [schema.get("type", "any"), *bounds]))


def _kinds() -> str:
    """The table of kinds, as the module that has them says it."""
    return "\n".join(f"| {name} | {what} |" for name, what in numbers.KINDS.items())


def _limits(limits: Limits) -> str:
    return f"""\
## Limits

| what | at most |
|---|---|
| a URL, all headers, a body | {limits.url_bytes} bytes, {limits.header_bytes} bytes, {limits.body_bytes} bytes |
| connections; live streams | {limits.connections}; {limits.live_streams} |
| until a request's head is there; until its answer | {limits.header_seconds:.0f} s; {limits.request_seconds:.0f} s |
| a page of rows | {limits.page_rows:,} rows, {limits.page_bytes >> 20} MiB |
| records one search reads | {limits.scan_records:,} |
"""


def _failures() -> str:
    lines = [
        "## When it cannot\n",
        'Every refusal is `{"error": …, "message": …, "remedy": …}` with one of these:\n',
    ]
    lines += ["| status | why |", "|---|---|"]
    lines += [f"| {status} | {why} |" for status, why in openapi.REFUSALS.items()]
    lines += [
        "| 403, 405, 408, 413, 431 | another site's script; not GET or HEAD; the request took too long; too large |"
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
