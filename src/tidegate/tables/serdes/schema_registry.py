"""A schema registry over HTTP: schemas by number, and numbers for schemas.

Speaks the registry protocol that Avro producers of Kafka use: `GET /schemas/ids/{id}`,
`POST /subjects/{subject}/versions`, `GET /subjects/{subject}/versions/latest`. A number's schema never changes, so
what was read once is kept; at most `kept` schemas are.

Every request has a timeout. A registry that cannot be reached or fails is `UnavailableError`, one that knows no such
schema or refuses one is `InvalidError`. Thread rule: one lock around what is kept; requests run beside each other.
"""

from __future__ import annotations

import base64
import json
import threading
import urllib.parse
from typing import Any, Final

from tidegate.errors import InvalidError, UnavailableError

CONTENT: Final = "application/vnd.schemaregistry.v1+json"
LARGEST_ANSWER: Final = 4 << 20


class SchemaRegistry:
    """One registry, at a URL like http://host:8081; `user` and `password` where it asks for them."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 10.0,
        user: str | None = None,
        password: str | None = None,
        kept: int = 10_000,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InvalidError(f"{url!r} is no address of a schema registry; write it like http://host:8081")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Accept": CONTENT, "Content-Type": CONTENT}
        if user is not None:
            pair = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        self._kept = kept
        self._schemas: dict[int, str] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def schema(self, number: int) -> str:
        """The text of the schema with this number."""
        with self._lock:
            known = self._schemas.get(number)
        if known is None:
            known = self._text(self._ask("GET", f"/schemas/ids/{number}"), f"schema {number}")
            with self._lock:
                _keep(self._schemas, number, known, self._kept)
        return known

    def register(self, subject: str, schema: str) -> int:
        """The number of a schema under a subject, given now if it has none yet."""
        with self._lock:
            known = self._numbers.get((subject, schema))
        if known is None:
            path = f"/subjects/{urllib.parse.quote(subject, safe='')}/versions"
            known = self._number(self._ask("POST", path, {"schema": schema}), subject)
            with self._lock:
                _keep(self._numbers, (subject, schema), known, self._kept)
        return known

    def latest(self, subject: str) -> tuple[int, str]:
        """The number and the text of a subject's newest schema; asked anew each time."""
        answer = self._ask("GET", f"/subjects/{urllib.parse.quote(subject, safe='')}/versions/latest")
        return self._number(answer, subject), self._text(answer, f"subject {subject}")

    def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        import urllib.error
        import urllib.request  # with TLS and all, for those who have a registry

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                raw = response.read(LARGEST_ANSWER + 1)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode(errors="replace")
            message = f"schema registry {self.url} answered {error.code} to {method} {path}: {said}"
            if error.code >= 500 or error.code in (408, 429):
                raise UnavailableError(f"{message}; try again later") from None
            raise InvalidError(message) from None
        except OSError as error:  # refused, unknown host, timeout
            raise UnavailableError(f"schema registry {self.url} cannot be reached: {error}") from None
        if len(raw) > LARGEST_ANSWER:
            raise UnavailableError(
                f"schema registry {self.url} answered {path} with more than {LARGEST_ANSWER} bytes"
            )
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise UnavailableError(
                f"schema registry {self.url} answered {path} with something that is no JSON object"
            )
        return answer

    def _text(self, answer: dict[str, Any], what: str) -> str:
        kind, text = answer.get("schemaType", "AVRO"), answer.get("schema")
        if kind != "AVRO":
            raise InvalidError(f"{what} of schema registry {self.url} is a {kind} schema, not an Avro one")
        if not isinstance(text, str):
            raise UnavailableError(f"schema registry {self.url} gave no text for {what}")
        return text

    def _number(self, answer: dict[str, Any], subject: str) -> int:
        number = answer.get("id")
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 31:
            raise UnavailableError(
                f"schema registry {self.url} gave {number!r} as the number of subject {subject}"
            )
        return number


def _keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Remember, and forget the oldest when there are too many."""
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value
