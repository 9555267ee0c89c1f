"""The `tidegate` command: its commands, where each one is defined, and how a run ends.

The module of a command is imported only when it is called, so that `--help` and the light commands never load Arrow,
numba or Spark. The lines of `--help` are here for the same reason.

M1  a run ends with one of the documented exit codes and at most one error on stderr (a line; a refusal that lists
    several things keeps its lines), never a traceback (`TIDEGATE_DEBUG=1` shows it).
M2  a closed pipe (`… | head`) ends the run quietly with 0; Ctrl-C with 130, SIGTERM with 143, both after the
    command has closed what it opened.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click

from tidegate.cli.options import EXIT_CODES, Command, Group, verbosity_options
from tidegate.cli.output import WARNINGS, CompileReporter, Verbosity, error_line
from tidegate.errors import TidegateError
from tidegate.kernels import compile_progress


class LazyCommand(NamedTuple):
    """Where a command is defined (`module:name`), and its line in `--help`."""

    target: str
    summary: str


class LazySubgroup(NamedTuple):
    """Commands below one word, and its line in `--help`."""

    commands: Mapping[str, LazyCommand]
    summary: str


COMMANDS: dict[str, LazyCommand | LazySubgroup] = {
    "topic": LazyCommand("topic:command", "Create, list, describe, alter and delete topics."),
    "produce": LazyCommand("records:produce", "Write records from a file or a pipe into a topic."),
    "consume": LazyCommand("records:consume", "Read records of a topic."),
    "log": LazySubgroup(
        {
            "dump": LazyCommand("log:dump_files", "Print log files line for line as kafka-dump-log does."),
            "lifetime": LazyCommand("log:show_lifetime", "How long a record really lives, and why."),
            "clean": LazyCommand("log:clean", "Run retention and compaction, and say what they did."),
            "reseal": LazyCommand("log:reseal", "Accept files that another program wrote."),
        },
        "Inspect and maintain the files of a log.",
    ),
    "run": LazyCommand("app:run", "Run a pipeline: from topics to windowed tables, on Spark or here."),
    "app": LazyCommand("app:command", "Show what an app did; resume, reset or replay a stopped app."),
    "push": LazyCommand(
        "versions:push", "Push rows as the next version of a table; shown once proven complete."
    ),
    "table": LazyCommand("table:command", "Read tables and their versions: fetch, scan, diff, swap, …"),
    "state": LazyCommand("state:command", "Sign the files of a state, or remove the signatures."),
    "verify": LazyCommand("verify:verify", "Check a topic or a Kafka data folder for damage and gaps."),
    "audit": LazySubgroup(
        {"compare": LazyCommand("verify:compare_topics", "Prove two topics equal, or name what differs.")},
        "Audits of more than one topic.",
    ),
    "certificate": LazyCommand("verify:certificate", "Certify what was read, and check it against the log."),
    "break": LazyCommand("verify:break_copy", "Copy a topic with one known damage, to see it found."),
    "ui": LazyCommand("ui:command", "Look at topics, records, tables and apps in a browser; HTTP API."),
    "doctor": LazyCommand("doctor:command", "Say what this machine has and what is missing."),
    "completion": LazyCommand("main:completion", "Print what a shell needs to complete commands."),
    "demo": LazyCommand("demo:command", "See faults planted and found, and a pipeline that counts right."),
}


class LazyGroup(Group):
    """A group whose commands are imported when they are called."""

    def __init__(self, commands: Mapping[str, LazyCommand | LazySubgroup], **settings: Any) -> None:
        super().__init__(**settings)
        self._commands = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._commands.get(cmd_name)
        if place is None:
            return None
        if isinstance(place, LazySubgroup):
            return LazyGroup(place.commands, name=cmd_name, help=place.summary, short_help=place.summary)
        module, _, name = place.target.partition(":")
        command: click.Command = getattr(import_module(f"tidegate.cli.{module}"), name)
        command.short_help = command.short_help or place.summary
        return command

    def summary(self, ctx: click.Context, name: str) -> str:
        return self._commands[name].summary

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._commands and not args[0].startswith("-"):
            raise click.UsageError(_unknown_command(args[0], self._commands), ctx)
        return super().resolve_command(ctx, args)


def _unknown_command(name: str, known: Mapping[str, object]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"no command {name!r}; {hint}"


@click.version_option(package_name="tidegate", message="%(prog)s %(version)s")
@verbosity_options
def _cli() -> None:
    pass


cli = LazyGroup(
    COMMANDS,
    name="tidegate",
    callback=_cli,
    params=_cli.__click_params__,  # type: ignore[attr-defined]
    help="Partitioned event logs in; verified, deduplicated, windowed tables out.",
    epilog=EXIT_CODES,
)


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@verbosity_options
def completion(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and their values with the tab key.

    \b
    eval "$(tidegate completion bash)"                                          in ~/.bashrc
    eval "$(tidegate completion zsh)"                                           in ~/.zshrc
    tidegate completion fish > ~/.config/fish/completions/tidegate.fish         once
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    if script is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(script(cli, {}, "tidegate", "_TIDEGATE_COMPLETE").source())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors are printed here (M1, M2)."""
    WARNINGS.setLevel(logging.WARNING)
    logging.getLogger("tidegate").addHandler(WARNINGS)
    try:
        return _run(arguments)
    finally:
        logging.getLogger("tidegate").removeHandler(WARNINGS)


def _run(arguments: Sequence[str] | None) -> int:
    with suppress(
        AttributeError, OSError
    ):  # names may be no text: shown as escapes where the stream can do it
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    talk = Verbosity()
    compile_progress.listen(CompileReporter(talk))
    try:
        outcome = cli.main(
            args=None if arguments is None else list(arguments),
            prog_name="tidegate",
            standalone_mode=False,
            obj=talk,
        )
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # click's own answer to a closed pipe is 1
            return 0
        raise
    except (click.Abort, KeyboardInterrupt):
        return 130
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        lines = error.format_message().rstrip(".").splitlines()  # click lists choices on lines of their own
        error_line(f"{' '.join(line.strip() for line in lines)}{where}")
        return error.exit_code
    except click.ClickException as error:
        error_line(error.format_message())
        return error.exit_code
    except TidegateError as error:
        error_line(str(error), kafka_name=error.kafka_name)
        return error.exit_code
    except FileNotFoundError as error:
        error_line(f"{error.filename or error} does not exist; check the path")
        return 3
    except (OSError, MemoryError) as error:
        error_line(f"{type(error).__name__}: {error}; the machine refused, check it and retry")
        return 3
    except Exception as error:  # the process edge: a person gets one line, not a traceback
        if os.environ.get("TIDEGATE_DEBUG"):
            raise
        said = " ".join(str(error).split("\n"))
        error_line(
            f"this is a fault in Tidegate, please report it: {type(error).__name__}: {said} "
            f"(TIDEGATE_DEBUG=1 shows where)"
        )
        return 1


def main() -> NoReturn:
    """The entry point of the installed `tidegate` script."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(run())


def _terminated(_signal: int, _frame: object) -> NoReturn:
    sys.exit(143)


def _forget_stdout() -> None:
    """Close stdout now, so that the interpreter's last flush has nothing left to complain about."""
    try:
        sys.stdout.close()
    except BrokenPipeError:
        pass


if __name__ == "__main__":
    main()
