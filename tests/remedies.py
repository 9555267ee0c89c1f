"""The commands that errors name: where each text lies in the source, and how it is typed as it was told.

A place is `module.function` (or the name of the constant that holds the text) and the command's words, such as
`log.catalog.unknown_topic: topic create`. `typed` finds that text in the source, requires that the message
in hand is that text, and runs the command as the message spells it. `tests/tidy/test_remedies_are_typed.py` asks
that every place is typed by a test.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tidegate as tg
from tidegate.cli.main import COMMANDS, LazySubgroup
from tidegate.cli.main import run as cli

SOURCE = Path(__file__).parents[1] / "src" / "tidegate"
_COMMAND = re.compile(r"`tidegate ([^`]+)`|(?:^|: )tidegate ([^;\n`#]+)$", re.MULTILINE)
_NO_ERRORS = (
    "demo",
    "demo_shop",
)  # shows, and a page of the handbook
_NOT_TOLD = (
    "cli",
    "session",
    "startswith",
)  # the page's commands to copy (tests/web/test_copies.py), names, checks
_HELPERS = {"verify_command": "`tidegate verify {}`", "reseal_command": "`tidegate log reseal {} --log {}`"}
_GROUPS = ("topic", "app", "table", "certificate", "state")


class Named(NamedTuple):
    """A command in a text of the source; what is computed there is `{…}`."""

    place: str
    command: str
    text: re.Pattern[str]

    def fits(self, command: str) -> bool:
        """Whether a command of a message is this one, with what is computed filled in."""
        return _pattern(self.command, whole=True).fullmatch(command) is not None


def commands(message: str) -> list[str]:
    """The commands that a message names, without `tidegate`."""
    return [(quoted or bare).strip() for quoted, bare in _COMMAND.findall(message)]


def words(command: str) -> str:
    """The verb of a command: `topic create`, `verify`."""
    first, *rest = command.split()
    has_verbs = isinstance(COMMANDS.get(first), LazySubgroup) or first in _GROUPS
    return f"{first} {rest[0]}" if has_verbs and rest else first


@cache
def named() -> dict[str, list[Named]]:
    """Every command that a text of the source names, by place."""
    found: dict[str, list[Named]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        if path.stem in _NO_ERRORS or path.parent.name == "testing":
            continue
        for holder, text in _texts(ast.parse(path.read_text()), ()):
            for command in filter(_is_known, commands(text)):
                place = f"{'.'.join((module, *holder))}: {words(command)}"
                found.setdefault(place, []).append(Named(place, command, _pattern(text)))
    return found


def typed(message: object, place: str, /, *more: str, expect: int = 0, **blanks: str) -> str:
    """Type the command that `message` names, as it is written there; what it printed."""
    arguments = spelled(message, place, *more, **blanks)
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = cli(arguments)
    told = printed.detach().getvalue().decode()  # type: ignore[attr-defined]
    assert code == expect, f"tidegate {shlex.join(arguments)} ended with {code}: {told}"
    return str(told)


def spelled(message: object, place: str, /, *more: str, **blanks: str) -> list[str]:
    """The arguments of the command that `message` names at `place`.

    `blanks` fill in words that a person replaces, such as `N`; `more` is added. Questions are answered by --yes.
    """
    message, known = str(message), named()[place]
    assert any(each.text.search(message) for each in known), f"{place} does not say: {message}"
    told = {each for each in commands(message) if any(each_of.fits(each) for each_of in known)}
    told = (
        {each for each in told if all(re.search(rf"\b{blank}\b", each) for blank in blanks)}
        if blanks
        else told
    )
    command = min(told, key=len)
    assert len(told) == 1 or not blanks, f"{place}: {told} of {message}"
    for blank, value in blanks.items():
        command = re.sub(rf"\b{blank}\b", value, command)
    asks = words(command) in ("topic delete", "app reset", "app replay", "app rebase")
    return [*shlex.split(command), *more, *(["--yes"] if asks else [])]


def written(message: str, code: str, scope: dict[str, Any] | None = None, **blanks: str) -> Any:
    """Evaluate Python that a message names; `…` and words like `topic` are what a person fills in."""
    assert code in message, message
    for blank, value in {"…": "", **blanks}.items():
        code = code.replace(blank, value)
    return eval(code, {"tg": tg, **{name: getattr(tg, name) for name in tg.__all__}, **(scope or {})})


def keyword(message: str, code: str, **blanks: str) -> dict[str, Any]:
    """The keyword argument that a message names: `emit='close'`."""
    assert code in message, message
    name, _, value = code.partition("=")
    return {name: written(value, value, **blanks)}


def _is_known(command: str) -> bool:
    return command.split()[0] in COMMANDS


def _pattern(text: str, *, whole: bool = False) -> re.Pattern[str]:
    """What a text looks like with its computed parts filled in."""
    gap = r"[^`\n]*" if whole else r".*"
    return re.compile(gap.join(re.escape(part) for part in re.split(r"\{[^{}]*\}", text)), re.DOTALL)


def _texts(
    node: ast.AST, holder: tuple[str, ...], inside: bool = False
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every string below a node that somebody is told, with the names of what holds it."""
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if is_docstring or (isinstance(child, ast.Call) and _called(child) in _NOT_TOLD):
            continue
        if isinstance(child, ast.FunctionDef) and child.name in _HELPERS:
            continue
        if isinstance(child, ast.JoinedStr):
            yield holder, "".join(map(_spelled, child.values))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield holder, child.value
        else:
            names = () if inside else _assigned(child)
            is_function = isinstance(child, ast.FunctionDef)
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                names = (child.name,)
            yield from _texts(child, (*holder, *names), inside or is_function)


def _spelled(part: ast.expr) -> str:
    """A piece of a text; what is computed is `{}`, or the command that a helper makes."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    computed = part.value if isinstance(part, ast.FormattedValue) else part
    return _HELPERS.get(_called(computed), "{}") if isinstance(computed, ast.Call) else "{}"


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _assigned(node: ast.AST) -> tuple[str, ...]:
    """The name of a constant."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return ()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return tuple(each.id for each in targets if isinstance(each, ast.Name))
