"""Options that mean the same in every command, and the logs and backends they name.

Decorators for a `@click.command(cls=Command)`: `@log_option`, `@log_options`, `@state_option`, `@format_option(…)`,
`@settings_option`, `@yes_option`, `@dry_run_option`, `@verbosity_options`. `LogAddress.open` and `opened_backend` open
what `--log` and `--state` name. `Command` and `Group` print the exit codes at the end of `--help`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from tidegate.cli.output import WARNINGS, Verbosity, say
from tidegate.config import parse_assignments, parse_properties
from tidegate.durations import duration_ms, size_bytes
from tidegate.errors import InvalidError

if TYPE_CHECKING:
    from tidegate.log.kafka.log import KafkaLog
    from tidegate.log.log import Log
    from tidegate.storage.backends.base import StorageBackend


DEFAULT_LOG = "./data/log"
_PROPERTIES_LIMIT_BYTES = 1 << 20
SERDE_NAMES = ("bytes", "string", "int", "long", "double", "json")
EXIT_CODES = (
    "Exit codes: 0 fine; 1 a check found a fault; 2 wrong usage; 3 out of reach, retry later; "
    "4 conflict or fenced; 5 corrupt input stopped the run; 130 interrupted."
)
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Command(click.Command):
    """A command whose help ends with the exit codes."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        settings.setdefault("context_settings", CONTEXT)
        settings.setdefault("epilog", EXIT_CODES)
        super().__init__(name, **settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _as_written(error, self, ctx, given) from None


class Group(click.Group):
    """A group of commands, likewise. A group called alone shows its help."""

    command_class = Command

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        settings.setdefault("context_settings", CONTEXT)
        settings.setdefault("epilog", EXIT_CODES)
        super().__init__(name, **settings)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the whole first sentence of each; click would cut it to fit one line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.summary(ctx, name)) for name in self.list_commands(ctx)])

    def summary(self, ctx: click.Context, name: str) -> str:
        """One command's line in the list."""
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=10_000)


class CheckedText(click.ParamType[Any]):
    """A duration or a size in an option: checked while options are read, so that a refusal names the option."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            self._parse(value)
        except InvalidError as error:
            self.fail(str(error), param, ctx)
        return value


DURATION = CheckedText("duration", duration_ms)
SIZE = CheckedText("size", size_bytes)


def _as_written(
    error: click.NoSuchOption, command: click.Command, ctx: click.Context, given: Sequence[str]
) -> click.NoSuchOption:
    """Name a word option that was written with one dash as a whole: `-once`, not `-o`."""
    from difflib import get_close_matches

    long = [each for param in command.get_params(ctx) for each in param.opts if each.startswith("--")]
    for word in given:
        written = word.partition("=")[0]
        if (
            len(error.option_name) == 2
            and written[:1] == "-" != written[1:2]
            and error.option_name[1] in written
        ):
            near = get_close_matches(f"-{written}", long)
            if near:
                return click.NoSuchOption(written, possibilities=near, ctx=ctx)
    return error


def log_option(command: AnyFunction) -> AnyFunction:
    """`--log URL` as parameter `log_url`: a folder or `kafka://host:port`, also as `--bootstrap-server`."""
    command = click.option(
        "--bootstrap-server",
        metavar="HOST:PORT",
        expose_value=False,
        is_eager=True,
        callback=_keep_bootstrap,
        help="The same as --log kafka://HOST:PORT.",
    )(command)
    return click.option(
        "--log",
        "log_url",
        metavar="URL",
        envvar="TIDEGATE_LOG",
        show_envvar=True,
        default=DEFAULT_LOG,
        show_default=True,
        callback=_choose_log,
        help="The log: a folder, or kafka://HOST:PORT.",
    )(command)


def settings_option(summary: str) -> Callable[[AnyFunction], AnyFunction]:
    """`-X KEY=VALUE`, repeated, as parameter `settings`: a dict."""
    return click.option(
        "-X",
        "--config",
        "settings",
        metavar="KEY=VALUE",
        multiple=True,
        callback=lambda _ctx, _parameter, pairs: parse_assignments(pairs),
        help=summary,
    )


def command_options(command: AnyFunction) -> AnyFunction:
    """`--command-config FILE` and `--command-property KEY=VALUE`: settings of the Kafka client."""
    command = click.option(
        "--command-property",
        "command_properties",
        metavar="KEY=VALUE",
        multiple=True,
        callback=lambda _ctx, _parameter, pairs: parse_assignments(pairs, option="--command-property"),
        help="One setting of the Kafka client (repeatable); only with kafka://.",
    )(command)
    return click.option(
        "--command-config",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="A properties file with settings of the Kafka client (the place for secrets).",
    )(command)


def format_option(
    formats: Sequence[str] = ("table", "json", "jsonl", "csv"), default: str | None = None
) -> Callable[[AnyFunction], AnyFunction]:
    """`--format`; without a default it is `table` on a terminal and `jsonl` in a pipe."""
    return click.option(
        "--format",
        "format",
        type=click.Choice(list(formats)),
        default=default,
        show_default="table on a terminal, jsonl in a pipe" if default is None else True,
        callback=lambda _ctx, _parameter, chosen: chosen or _usual_format(),
        help="How to print.",
    )


def yes_option(command: AnyFunction) -> AnyFunction:
    """`--yes`: do not ask."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")(command)


def confirm(question: str, yes: bool) -> None:
    """Ask `question` unless `--yes` was given; end the command with exit code 130 when the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidError(f"{question.removesuffix('?')}: add --yes, because nobody can be asked here")
    if not click.confirm(question, err=True):
        say("nothing was changed")
        raise click.Abort


def dry_run_option(command: AnyFunction) -> AnyFunction:
    """`--dry-run`: say, do not do."""
    return click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")(command)


def verbosity_options(command: AnyFunction) -> AnyFunction:
    """`-q` and `-v`: how much is said on stderr. Not parameters; `output.say` and `detail` obey them."""
    command = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=lambda ctx, _parameter, on: _set_level(ctx, 2) if on else None,
        help="Say more on stderr.",
    )(command)
    return click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=lambda ctx, _parameter, on: _set_level(ctx, 0) if on else None,
        help="Say nothing on stderr but errors.",
    )(command)


@dataclass(frozen=True, slots=True)
class LogAddress:
    """Where a log is, and the settings of the Kafka client that reaches it: a file's, and those of options."""

    url: str
    config_file: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def open(self, settings: Mapping[str, str] | None = None, **how: Any) -> Iterator[Log | KafkaLog]:
        """Open the log and close it at the end; `settings` of the client count more than those of the file."""
        from tidegate.log.log import open_log

        client = client_settings(self.config_file, {**(settings or {}), **self.properties})
        with open_log(self.url, client=client, **how) as log:
            yield log


def log_options(command: AnyFunction) -> AnyFunction:
    """`log_option` and `command_options` together, as parameter `at`: a `LogAddress`."""

    @wraps(command)
    def with_address(
        log_url: str, command_config: str | None, command_properties: dict[str, str], **rest: Any
    ) -> Any:
        return command(at=LogAddress(log_url, command_config, command_properties), **rest)

    return cast(AnyFunction, log_option(command_options(with_address)))


def client_settings(command_config: str | None, client: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the settings of the Kafka client: those of the file, overridden by those of the options."""
    from tidegate.files import Files

    stored: dict[str, str] = {}
    if command_config is not None:
        content = Files().read(Path(command_config), limit=_PROPERTIES_LIMIT_BYTES)
        try:
            stored = parse_properties(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidError(
                f"--command-config {command_config}: not UTF-8 at byte {error.start}; it is a properties file, "
                "with KEY=VALUE on each line"
            ) from None
    return {**stored, **(client or {})}


def _set_level(ctx: click.Context, level: int) -> None:
    ctx.find_root().ensure_object(Verbosity).level = level
    WARNINGS.setLevel(logging.WARNING if level else logging.CRITICAL)


def _keep_bootstrap(ctx: click.Context, _parameter: click.Parameter, server: str | None) -> None:
    if server:
        ctx.meta["tidegate.bootstrap"] = server


def _choose_log(ctx: click.Context, parameter: click.Parameter, url: str) -> str:
    server = ctx.meta.get("tidegate.bootstrap")
    if server is None:
        return url
    if ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--log and --bootstrap-server both say where the log is; keep one", ctx)
    return f"kafka://{server}"


def _usual_format() -> str:
    return "table" if sys.stdout.isatty() else "jsonl"


def state_option(command: AnyFunction) -> AnyFunction:
    """`--state URL` as parameter `state`."""
    return click.option(
        "--state", "state", metavar="URL", envvar="TIDEGATE_STATE", show_envvar=True, default="./data/state",
        show_default=True, help="Where apps and tables are kept: a folder, or s3://BUCKET/PATH.",
    )(command)  # fmt: skip


@contextmanager
def opened_backend(state: str, *, read_only: bool = True) -> Iterator[StorageBackend]:
    """The backend at an address; it must be there, and one that is read is left as it is."""
    from tidegate.storage import open_backend

    backend = open_backend(state, create=False, read_only=read_only)
    try:
        yield backend
    finally:
        backend.close()
