"""What a page of the handbook holds: its code blocks, what they are said to print, its links and headings.

A ```python or ```sh block is run. Flags behind the language: `skip` it is not run; `spark` its page is run together
with Spark. A ```text output block is what the block before it prints: a line `…` stands for any lines, a `…` in a line
for any text. Other languages are for reading.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


class Block(NamedTuple):
    """One block to run, and what it prints (None: the page does not say)."""

    language: str
    flags: frozenset[str]
    code: str
    output: str | None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """Every ```python and ```sh block of a page."""
    found: list[Block] = []
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        language, *flags = match["info"].split() or [""]
        if language in ("python", "sh"):
            found.append(Block(language, frozenset(flags), match["code"], None))
        elif "output" in flags:
            found[-1] = found[-1]._replace(output=match["code"])
    return found


def needs_spark(page: Path) -> bool:
    return any("spark" in block.flags for block in blocks(page))


def runnable(page: Path) -> list[Block]:
    return [block for block in blocks(page) if "skip" not in block.flags]


def difference(expected: str, printed: str) -> str | None:
    """None when the page tells what was printed, else both."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "…" else r".*?".join(map(re.escape, line.split("…"))) + r"[ ]*\n"
        for line in expected.splitlines()
    )
    if re.fullmatch(pattern, printed if printed.endswith("\n") else printed + "\n"):
        return None
    return f"the page says\n{expected}\nand it printed\n{printed}"


def links(page: Path) -> list[tuple[str, str]]:
    """(file, anchor) of every link of a page that stays in this repository; a picture is one, too."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    inside = []
    for match in LINK.finditer(prose):
        if "://" not in match["target"] and not match["target"].startswith("mailto:"):
            file, _, anchor = match["target"].partition("#")
            inside.append((file, anchor))
    return inside


def anchors(page: Path) -> set[str]:
    """What a heading is called in a link, as the site and GitHub agree on."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {slug(heading) for heading in headings}


def slug(heading: str) -> str:
    text = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode("ascii")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
