"""Settings with a name, a type, a range and a default; and the files people keep them in.

A `Setting` is one key as users type it (Kafka's dotted names). A `Settings` is a closed set of them: it
turns what was typed into checked values and answers an unknown name with the nearest known one.

| typed | accepted as |
|---|---|
| `retention.ms=600000` | the exact key; a bare number on a `.ms` or `.bytes` key is milliseconds or bytes |
| `retention.ms=10m`, `segment.bytes=16KiB` | the exact key with a unit |
| `retention=10m`, `retention=1GiB` | the key without its unit: the written unit says which one is meant |

What it does not know: which settings exist (each package brings its own) and where values come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeAlias

from tidegate.durations import duration_ms, size_bytes
from tidegate.errors import InvalidError

SettingValue: TypeAlias = "int | float | bool | str | frozenset[str]"

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
_LONG_MIN = -(2**63)
_INT_MIN = -(2**31)
_NUMBER = re.compile(r"[+-]?\d{1,30}")
_UNITS = ("ms", "bytes")


class Kind(Enum):
    """What a value is, in Kafka's words."""

    INT = "int"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    WORD = "string"
    LIST = "list"


_WIDEST: dict[Kind, tuple[float, float]] = dict.fromkeys(Kind, (float("-inf"), float("inf")))
_WIDEST |= {Kind.INT: (_INT_MIN, INT_MAX), Kind.LONG: (_LONG_MIN, LONG_MAX)}


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: its type, range, default and meaning. `parse` and `format` are inverse to each other."""

    name: str
    kind: Kind
    default: SettingValue
    summary: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def unit(self) -> str | None:
        """`ms` or `bytes` where the name ends so."""
        tail = self.name.rpartition(".")[2]
        return tail if tail in _UNITS else None

    @property
    def valid(self) -> str:
        """The accepted values, for messages and help."""
        if self.kind is Kind.BOOLEAN:
            return "true or false"
        if self.choices:
            return ("a list of " if self.kind is Kind.LIST else "one of ") + ", ".join(self.choices)
        if self.kind is Kind.WORD:
            return "text"
        low, high = self._bounds()
        return f"{low:g} to {high:g}" if self.kind is Kind.DOUBLE else _range_text(low, high)

    def parse(self, value: Any) -> SettingValue:
        """The checked value of what was typed or handed in; `InvalidError` names the key and its range."""
        if self.kind is Kind.BOOLEAN:
            return self._parse_boolean(value)
        if self.kind is Kind.WORD:
            return self._parse_word(value)
        if self.kind is Kind.LIST:
            return self._parse_list(value)
        number = self._parse_double(value) if self.kind is Kind.DOUBLE else self._parse_integer(value)
        low, high = self._bounds()
        if not low <= number <= high:
            raise InvalidError(
                f"{self.name}={value}: out of range; valid is {self.valid}", kafka_name="INVALID_CONFIG"
            )
        return number

    def format(self, value: SettingValue) -> str:
        """As Kafka prints it."""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, frozenset):
            return ",".join(word for word in self.choices if word in value)
        return str(value)

    def _bounds(self) -> tuple[float, float]:
        low, high = _WIDEST[self.kind]
        return (
            low if self.minimum is None else self.minimum,
            high if self.maximum is None else self.maximum,
        )

    def _wrong(self, value: Any, wanted: str) -> InvalidError:
        return InvalidError(f"{self.name}={value}: not {wanted}", kafka_name="INVALID_CONFIG")

    def _parse_boolean(self, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text not in ("true", "false"):
            raise self._wrong(value, "true or false")
        return text == "true"

    def _parse_word(self, value: Any) -> str:
        text = str(value).strip()
        if self.choices and text not in self.choices:
            raise self._wrong(value, self.valid)
        return text

    def _parse_list(self, value: Any) -> frozenset[str]:
        words = str(value).split(",") if isinstance(value, str) else [str(word) for word in value]
        chosen = frozenset(word.strip() for word in words if word.strip())
        if not chosen <= set(self.choices):
            raise self._wrong(value, self.valid)
        return chosen

    def _parse_double(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self._wrong(value, "a number") from None
        if number != number:
            raise self._wrong(value, "a number")
        return number

    def _parse_integer(self, value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, timedelta) and self.unit == "ms":
            return duration_ms(value)
        if isinstance(value, str):
            text = value.strip()
            if _NUMBER.fullmatch(text):
                return int(text)
            try:
                if self.unit == "ms":
                    return duration_ms(text)
                if self.unit == "bytes":
                    return size_bytes(text)
            except InvalidError as error:
                raise InvalidError(f"{self.name}={value}: {error}", kafka_name="INVALID_CONFIG") from None
        wanted = {"ms": "milliseconds or a duration like 10m", "bytes": "bytes or a size like 16KiB"}
        raise self._wrong(value, wanted.get(self.unit or "", "a whole number"))


class Settings:
    """A closed set of settings, looked up by exact name or by name without its unit."""

    def __init__(self, settings: Iterable[Setting], *, noun: str) -> None:
        self.noun = noun
        self._by_name = {setting.name: setting for setting in settings}
        self._by_stem: dict[str, list[Setting]] = {}
        for setting in self._by_name.values():
            if setting.unit is not None:
                self._by_stem.setdefault(setting.name.rpartition(".")[0], []).append(setting)

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._by_name.values())

    def __getitem__(self, name: str) -> Setting:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def find(self, name: str, value: Any = None) -> Setting:
        """The setting meant by a typed name, `value` deciding between units; unknown → the nearest name."""
        if (setting := self._by_name.get(name)) is not None:
            return setting
        candidates = self._by_stem.get(name, [])
        unit = _unit_of(value)
        for candidate in candidates:
            if candidate.unit == unit:
                return candidate
        if candidates:
            named = " or ".join(candidate.name for candidate in candidates)
            raise InvalidError(
                f"{name}={value} does not say its unit: write {name}=10m or {name}=16KiB, or use {named}",
                kafka_name="INVALID_CONFIG",
            )
        near = self.nearest(name)
        hint = f"did you mean {near}?" if near else f"the nearest is {self.nearest(name, likeness=0.0)}"
        raise InvalidError(f"{name} is not a {self.noun}; {hint}", kafka_name="INVALID_CONFIG")

    def parse(self, typed: Mapping[str, Any]) -> dict[str, SettingValue]:
        """Exact names and checked values of everything typed; the same key twice is refused."""
        parsed: dict[str, SettingValue] = {}
        for name, value in typed.items():
            setting = self.find(name, value)
            if setting.name in parsed:
                raise InvalidError(
                    f"{setting.name} is given twice (once as {name}); keep one", kafka_name="INVALID_CONFIG"
                )
            parsed[setting.name] = setting.parse(value)
        return parsed

    def nearest(self, name: str, *, likeness: float = 0.6) -> str | None:
        """The known name most like a mistyped one."""
        from difflib import get_close_matches

        names = [*self._by_name, *self._by_stem] if likeness else list(self._by_name)
        found = get_close_matches(name.lower(), names, n=1, cutoff=likeness)
        return found[0] if found else None


def _unit_of(value: Any) -> str | None:
    if isinstance(value, timedelta):
        return "ms"
    if not isinstance(value, str) or _NUMBER.fullmatch(value.strip()):
        return None
    for unit, read in (("ms", duration_ms), ("bytes", size_bytes)):
        try:
            read(value)
        except InvalidError:
            continue
        return unit
    return None


def _range_text(low: float, high: float) -> str:
    if high in (INT_MAX, LONG_MAX):
        return f"{int(low)} or more"
    return f"{int(low)} to {int(high)}"


def parse_assignments(pairs: Iterable[str], *, option: str = "-X") -> dict[str, str]:
    """`KEY=VALUE` strings of a repeated option as a mapping."""
    assignments: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise InvalidError(f"{option} {pair}: write it as KEY=VALUE")
        if key.strip() in assignments:
            raise InvalidError(f"{option} {key.strip()} is given twice; keep one")
        assignments[key.strip()] = value.strip()
    return assignments


_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_SEPARATOR = re.compile(r"(?<!\\)(?:\\\\)*(?P<at>\s*[=:]\s*|\s+)")


def parse_properties(text: str) -> dict[str, str]:
    """A Java `.properties` file: `#`/`!` comments, `=`, `:` or blank separators, continued lines, escapes."""
    properties: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        logical = line.lstrip()
        if not logical or logical[0] in "#!":
            continue
        while (len(logical) - len(logical.rstrip("\\"))) % 2:
            logical = logical[:-1] + next(lines, "").lstrip()
        match = _SEPARATOR.search(logical)
        key, value = (logical[: match.start("at")], logical[match.end() :]) if match else (logical, "")
        properties[_unescape(key)] = _unescape(value.rstrip(" \t"))
    return properties


def _unescape(text: str) -> str:
    plain = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}

    def one(match: re.Match[str]) -> str:
        code = match.group(1)
        return chr(int(code[1:], 16)) if len(code) == 5 else plain.get(code, code)

    return _ESCAPE.sub(one, text)
