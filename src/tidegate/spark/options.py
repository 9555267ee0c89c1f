"""Options of a Spark data source as they come, text by text, and as what they mean.

Names are compared without regard to case, as Spark does. An unknown option is an error: a misspelt limit that is
silently ignored costs more than a message. Names that begin with one of a source's prefixes (`kafka.`) are handed
on as they are.

Pure; knows neither Spark nor a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from tidegate.durations import duration_ms, moment_ms, size_bytes
from tidegate.errors import InvalidError


class GivenOptions:
    """The options one user gave to one source."""

    def __init__(
        self,
        options: Mapping[str, str],
        names: tuple[str, ...],
        *,
        source: str,
        aliases: Mapping[str, str] | None = None,
        prefixes: tuple[str, ...] = (),
    ) -> None:
        self._spelling = {name.lower(): name for name in names}
        self._given: dict[str, str] = {}
        self._prefixed: dict[str, str] = {}
        for name, value in options.items():
            key = name.lower()
            if key.startswith(prefixes):
                self._prefixed[key] = value
                continue
            if key not in self._spelling:
                near = get_close_matches(key, list(self._spelling), n=1)
                hint = f"did you mean {self._spelling[near[0]]}?" if near else f"there are {', '.join(names)}"
                raise InvalidError(f"the {source} has no option {name!r}; {hint}")
            key = (aliases or {}).get(key, key)
            if self._given.get(key, value) != value:
                raise InvalidError(
                    f"option {self._spelling[key]} is given twice, as {self._given[key]!r} and {value!r}"
                )
            self._given[key] = value

    def text(self, name: str) -> str | None:
        """The option as it is; None when it was not given."""
        return self._given.get(name.lower())

    def required(self, name: str, example: str) -> str:
        found = self.text(name)
        if not found:
            raise InvalidError(f"option {name} is missing: {example}")
        return found

    def below(self, prefix: str) -> dict[str, str]:
        """The options of a prefix, without it."""
        return {
            key.removeprefix(prefix): value for key, value in self._prefixed.items() if key.startswith(prefix)
        }

    def moment(self, name: str) -> int | None:
        """A moment as epoch milliseconds, written as such or as ISO 8601."""
        text = self.text(name)
        if text is None:
            return None
        return moment_ms(int(text) if text.strip().lstrip("-").isdecimal() else text)

    def count(self, name: str, *, least: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not text.strip().isdecimal() or int(text) < least:
            raise InvalidError(f"{name}={text!r} is not a whole number of at least {least}")
        return int(text)

    def size(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        size = size_bytes(text)
        if size < 1:
            raise InvalidError(f"{name}={text!r} would read nothing; give at least 1")
        return size

    def duration(self, name: str, default: str) -> int:
        """Milliseconds."""
        return duration_ms(self.text(name) or default)

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in ("true", "false"):
            raise InvalidError(f"{name}={text!r} is neither true nor false")
        return text.strip().lower() == "true"

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """One of the words; the first of them when none was given."""
        text = (self.text(name) or allowed[0]).strip().lower()
        if text not in allowed:
            raise InvalidError(f"{name}={text!r} is none of {', '.join(allowed)}")
        return text

    def words(self, name: str) -> tuple[str, ...]:
        """Several, with commas between; each once."""
        text = self.text(name) or ""
        return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
