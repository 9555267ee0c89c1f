"""`tidegate run` and `tidegate app`: run the app that a module defines; inspect, resume, reset or replay its state.

`MODULE:app` names the app:

    tidegate run shop.pipeline:app        a module on the path, or in the working folder
    tidegate run pipelines/shop.py:app    a file
    tidegate run shop                     the only App in it

The folder the module was found in is added to PYTHONPATH, so that Spark's Python workers find the same module. While
an app runs, one status line is shown on stderr (`output.LiveLine`):

    shop  12.4 M records  2.1 M/s  lag 3.6 M (2s)  stream time 10:41:07  backlog ▰▰▱▱▱ 38%  memory ▰▱▱▱▱ 12%  2 faults
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from tidegate.cli.options import (
    DURATION,
    Command,
    Group,
    LogAddress,
    command_options,
    confirm,
    format_option,
    opened_backend,
    state_option,
    verbosity_options,
    yes_option,
)
from tidegate.cli.output import (
    LiveLine,
    bar,
    echo,
    print_object,
    print_rows,
    printable,
    say,
    short,
    to_json,
    warn,
)
from tidegate.durations import counted, format_duration, format_moment, format_size
from tidegate.errors import InvalidError, TidegateError, UnavailableError

if TYPE_CHECKING:
    from tidegate.pipeline.admin import AppStatus, CommitInfo
    from tidegate.pipeline.definition.app import App
    from tidegate.pipeline.progress import Progress
    from tidegate.pipeline.query import Run, Summary


# -- the app that MODULE:app names -----------------------------------------------------------------


def load_app(where: str) -> App:
    """The app that `where` names, or `InvalidError` that says what is there instead."""
    from tidegate.pipeline.definition.app import App

    place, _, name = where.partition(":")
    module = _load(place)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if name:
        if name in apps:
            return apps[name]
        if hasattr(module, name):
            raise InvalidError(f"{where}: {name} is a {type(getattr(module, name)).__name__}, not an App")
        near = get_close_matches(name, apps, 1)
        hint = f"; did you mean {place}:{near[0]}?" if near else _listed(place, apps)
        raise InvalidError(f"{place} has no {name}{hint}")
    different = {id(app): key for key, app in apps.items()}
    if len(different) != 1:
        raise InvalidError(f"{place} does not say which app to take" + _listed(place, apps))
    return apps[next(iter(different.values()))]


def _load(place: str) -> ModuleType:
    if not place:
        raise InvalidError("which app? Say MODULE:app, like shop.pipeline:app, or a file, like shop.py:app")
    path = Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise InvalidError(f"there is no file {place}")
        folder, name = path.resolve().parent, path.stem
    else:
        folder, name = Path.cwd(), place
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(folder), *filter(None, known)]))
    try:
        return importlib.import_module(name)
    except TidegateError as error:
        error.args = (f"{error}{_place(error, folder)}",)
        raise
    except (Exception, SystemExit) as error:  # the user's code: it may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name is not None and name.startswith(error.name):
            raise InvalidError(
                f"there is no module {name}; run this in the folder it lies in, or name the file: {name}.py:app"
            ) from None
        raise InvalidError(f"{place} cannot be imported: {_said(error, folder)}") from error


def _said(error: BaseException, folder: Path) -> str:
    """An error of the user's module in one line, with the place in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return said if isinstance(error, SyntaxError) else said + _place(error, folder)  # it has its own place


def _place(error: BaseException, folder: Path) -> str:
    """Where in the user's files the error was raised: ` (shop.py, line 12)`."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and "site-packages" not in frame.filename
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _listed(place: str, apps: dict[str, App]) -> str:
    if not apps:
        return "; it defines no App. An app is made with tidegate.App(…)"
    return "; it has " + ", ".join(f"{place}:{name}" for name in sorted(apps))


# -- the status line -------------------------------------------------------------------------------


def line(progress: Progress) -> str:
    """The live line."""
    parts = [
        printable(progress.app),
        f"{short(progress.records)} records",
        f"{short(progress.records_per_second)}/s",
        "caught up" if progress.caught_up else _lag(progress),
    ]
    if (time := _stream_time(progress)) is not None:
        parts.append(f"stream time {time}")
    if progress.backlog_limit_bytes:
        parts.append(f"backlog {bar(progress.backlog_bytes / progress.backlog_limit_bytes)}")
    if progress.memory_limit_bytes:
        parts.append(f"memory {bar(progress.memory_bytes / progress.memory_limit_bytes)}")
    faults = sum(progress.faults.values())
    parts.append(counted(faults, "fault"))
    if progress.stopped:
        parts.append(f"{len(progress.stopped)} stopped")
    return "  ".join(parts)


def _lag(progress: Progress) -> str:
    left = "" if progress.eta_s is None else f" ({format_duration(max(1, round(progress.eta_s)) * 1000)})"
    return f"lag {short(progress.lag_records)}{left}"


def _stream_time(progress: Progress) -> str | None:
    """How far the slowest partition has come."""
    times = [time for flow in progress.watermarks.values() for time in flow.values() if 0 <= time < 2**53]
    return None if not times else datetime.fromtimestamp(min(times) / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


# -- tidegate run ----------------------------------------------------------------------------------


@click.command("run", cls=Command)
@click.argument("where", metavar="MODULE:APP")
@click.option(
    "--engine",
    type=click.Choice(["auto", "spark", "local"]),
    default="auto",
    show_default=True,
    help="Where tasks run: Spark, or threads of this process. auto is Spark where it is installed.",
)
@click.option("--master", metavar="URL", help="Spark's master.  [default: local[*,4]]")
@click.option("--once", is_flag=True, help="End when everything that is in the log is done.")
@click.option("--close", is_flag=True, help="With --once: the input ends there, so every window is final.")
@click.option(
    "--trigger",
    type=DURATION,
    metavar="DURATION",
    default="1s",
    show_default=True,
    help="Rounds when caught up.",
)
@click.option("--round-records", type=click.IntRange(min=1), help="Rounds of so many records, not by time.")
@click.option(
    "--on-loss",
    type=click.Choice(["stop", "accept"]),
    default="stop",
    show_default=True,
    help="What to do when records were deleted before they were read; accept is recorded for ever.",
)
@click.option("--metrics", metavar="[HOST]:PORT", help="Serve metrics for Prometheus there, like :9108.")
@click.option("--explain", is_flag=True, help="Print the plan and do nothing.")
@verbosity_options
def run(
    where: str,
    engine: str,
    master: str | None,
    once: bool,
    close: bool,
    trigger: str,
    round_records: int | None,
    on_loss: str,
    metrics: str | None,
    explain: bool,
) -> int:
    """Run the app that a module defines, until it is interrupted or, with --once, has caught up.

    \b
    tidegate run shop.pipeline:app
    tidegate run shop.py --once --close
    tidegate run shop:app --metrics :9108
    tidegate run shop:app --explain

    It goes on where it stopped, on whatever engine. Ctrl-C ends it after the round it is in; nothing is lost
    either way. Exit code 1: validation found faults that nobody acknowledged yet, or stopped a partition. Exit code
    5: a partition stopped because it cannot be read. Both come with the command that goes on.
    """

    if close and not once:
        raise click.UsageError("--close says that the input ends, so it needs --once")
    app = load_app(where)
    if explain:
        echo(app.explain())
        return 0
    from tidegate.pipeline.progress import with_state

    try:
        return run_app(
            app,
            engine=engine,
            master=master,
            metrics=metrics,
            until="caught_up" if once else None,
            close=close,
            trigger=trigger,
            round_records=round_records,
            on_loss=on_loss,
        )
    except TidegateError as error:
        error.args = (with_state(str(error), app.state),)
        raise


def run_app(app: App, *, engine: str, master: str | None, metrics: str | None, **settings: Any) -> int:
    """Start it, show how it goes, and tell how it ended."""
    from tidegate.metrics import Metrics

    measured = Metrics()
    if metrics is not None:
        _serve(measured, metrics)
    chosen = _engine(engine, master, app.name)
    with LiveLine() as live:

        def show(progress: Progress) -> None:
            live.tell(lambda: line(progress), lambda: _document(progress))

        run = app._opened(chosen, metrics=measured, progress=show, **settings)
        code = 0
        try:
            try:
                run.begin()
                summary = _waited(run)
            except (
                KeyboardInterrupt,
                SystemExit,
            ) as asked:  # SystemExit: SIGTERM of whoever runs services here
                code = 130 if isinstance(asked, KeyboardInterrupt) else int(asked.code or 0)
                live.clear()
                say("stopping after this round; once more to stop at once")
                run.stop()
                summary = _waited(run)
        finally:
            if run.is_running:  # a second interrupt, wherever it came
                _end_now(run, code or 130)
        live.clear()
        if live.is_terminal:
            say(str(summary))
        else:
            click.echo(to_json({**_document(summary), "summary": str(summary)}))
    return code or int(summary.exit_code)


def _document(told: Progress | Summary) -> dict[str, Any]:
    """What is told as JSON has it. `dataclasses.asdict` would count the items of a Counter."""
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(told, str_keys=True, enc_hook=str)
    return found


def _end_now(run: Run, code: int) -> NoReturn:
    """End the process without waiting for the threads that are in the round, as an ordinary exit would."""
    try:
        run.give_up()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also when interrupted again
        os._exit(code)


def _waited(run: Any) -> Any:
    """Until it ends; in small steps, so that an interrupt is seen at once."""
    while run.is_running:
        run.join("200ms")
    return run.await_termination()


def _engine(engine: str, master: str | None, name: str) -> Any:
    if engine == "local":
        if master is not None:
            raise click.UsageError("--master is Spark's; leave it out with --engine local")
        return "local"
    from tidegate.spark import session

    try:
        spark = session(name) if master is None else session(name, master=master)
    except UnavailableError as error:
        if engine == "spark" or master is not None:
            raise
        warn(f"running without Spark, in this process: {error}")
        return "local"
    spark.sparkContext.setLogLevel("ERROR")
    # Spark's own handler cancels all jobs at once; here the first interrupt lets the round come to its end.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return spark


def _serve(metrics: Any, address: str) -> None:
    """Answer Prometheus on this address, in the background."""
    from tidegate.metrics import serve_metrics

    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise InvalidError(f"--metrics {address}: say [HOST]:PORT, like :9108")
    host = host or "127.0.0.1"
    serve_metrics(metrics, host, int(port))
    say(f"metrics on http://{host}:{port}/metrics")


# -- tidegate app ----------------------------------------------------------------------------------


@click.group("app", cls=Group)
def command() -> None:
    """Show what an app did, and resume, replay or reset it.

    \b
    tidegate app status                               every app of ./data/state
    tidegate app status shop --log ./data/log         with what is left to read
    tidegate app checkpoints shop                     the commits that are kept
    tidegate app resume shop --partition orders-3     read on in a partition that a fault stopped
    tidegate app acknowledge shop                     the faults found so far are known
    tidegate app replay shop --to-round 120           compute again from a commit, or from the beginning
    tidegate app reset shop                           forget everything it knows

    Changes are refused while the app runs. Topics and their records are never touched.
    """


@command.command("status")
@click.argument("app", required=False)
@state_option
@click.option(
    "--log", "log_url", metavar="URL", envvar="TIDEGATE_LOG", help="Also say how much is left to read."
)
@command_options
@format_option()
@verbosity_options
def status(
    app: str | None,
    state: str,
    log_url: str | None,
    command_config: str | None,
    command_properties: dict[str, str],
    format: str,
) -> int:
    """Print where APP stands, or all apps.

    Exit codes are those of `tidegate run`: 1 when validation found faults that nobody acknowledged, or stopped a
    partition; 5 when a partition is stopped because it cannot be read.
    """
    from tidegate.pipeline.admin import app_status, list_apps
    from tidegate.pipeline.progress import exit_code_of, faults_of, given_state, new_faults

    opening: AbstractContextManager[Any] = nullcontext()
    if log_url is not None:
        opening = LogAddress(log_url, command_config, command_properties).open(read_only=True)
    with opened_backend(state) as backend, opening as log:
        names = list_apps(backend) if app is None else [app]
        found = [app_status(backend, name, log, orphans=True) for name in names]
        at = given_state(backend.address)
    if not found:
        say(f"no app has state in {state}")
    print_rows([_status_row(each) for each in found], format=format, columns=_STATUS_COLUMNS)
    for one in found:
        for flow, held in one.held.items():
            waited = f", until {one.topics[flow]}-{held.waits_for[1]} has come as far as they are"
            say(f"held back: {held.events:,} records of {flow}{waited if held.waits_for[1] >= 0 else ''}")
    for one in found:
        if one.orphans:
            objects = f"{one.orphans:,} objects ({format_size(one.orphan_bytes or 0)}) of {one.app}"
            say(f"orphans: {objects} that no commit needs; runs remove them when they are an hour old")
    stopped = [each for one in found for each in one.stopped]
    for each in stopped:
        say(f"stopped ({each.reason}): {each.message}")
        say(f"  resume with: {each.command}")
    new = 0
    for one in found:
        if unknown := new_faults(one.totals, one.topics):
            new += unknown
            faults = faults_of(one.totals, one.topics)
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in faults.items())
            say(f"{one.app}: faults: {kinds}; when they are known: tidegate app acknowledge {one.app}{at}")
    return exit_code_of(stopped, new)


_STATUS_COLUMNS = (
    "app",
    "round",
    "records",
    "lag",
    "committed",
    "run_by",
    "stopped",
    "faults",
    "losses",
    "orphans",
    "change",
)


def _status_row(status: AppStatus) -> dict[str, Any]:
    from tidegate.pipeline.progress import faults_of, new_faults

    faults = faults_of(status.totals, status.topics)
    names = ("generation", "backlog_bytes", "orphan_bytes", "positions", "watermarks", "totals")
    return {
        "app": status.app,
        "round": status.round,
        "records": status.records,
        "lag": status.lag_records,
        "committed": format_moment(status.committed_ms),
        "run_by": status.owner or None,
        "stopped": len(status.stopped),
        "faults": sum(faults.values()),
        "losses": len(status.losses),
        "orphans": status.orphans,
        "change": status.change or None,
        "held": {flow: held.events for flow, held in status.held.items()},
        **{name: getattr(status, name) for name in names},
        "faults_by_kind": faults,
        "new_faults": new_faults(status.totals, status.topics),
    }


@command.command("checkpoints")
@click.argument("app")
@state_option
@format_option()
@verbosity_options
def checkpoints(app: str, state: str, format: str) -> None:
    """Print the commits of APP that are kept: what `replay --to-round` and `as_of` reach."""
    from tidegate.pipeline.admin import app_commits

    with opened_backend(state) as backend:
        commits = app_commits(backend, app)
    columns = ("round", "committed", "records", "generation", "positions", "change")
    rows = [
        {name: getattr(each, name) for name in ("round", "records", "generation", "positions")}
        | {"committed": format_moment(each.committed_ms), "change": each.change or None}
        for each in commits
    ]
    print_rows(rows, format=format, columns=columns)


@command.command("reset")
@click.argument("app")
@state_option
@yes_option
@verbosity_options
def reset(app: str, state: str, yes: bool) -> None:
    """Forget all that APP knows: state, and where it was reading. Its topics stay as they are."""
    from tidegate.pipeline.admin import reset_app

    confirm(f"forget all state of app {app}?", yes)
    with opened_backend(state, read_only=False) as backend:
        _told(app, reset_app(backend, app))


@command.command("replay")
@click.argument("app")
@click.option("--to-round", type=click.IntRange(min=0), help="Back to a commit that is kept, state and all.")
@click.option(
    "--from-offset",
    "offsets",
    metavar="FLOW:P=OFFSET",
    multiple=True,
    help="With empty state of that partition from this offset on (repeatable; all partitions of a re-keyed flow).",
)
@state_option
@yes_option
@verbosity_options
def replay(app: str, to_round: int | None, offsets: tuple[str, ...], state: str, yes: bool) -> None:
    """Compute APP's results again: from the beginning of the log, from a commit, or from offsets.

    Results are sent again; in tables the later ones count.
    """
    from tidegate.pipeline.admin import replay_app

    confirm(f"send results of app {app} again?", yes)
    with opened_backend(state, read_only=False) as backend:
        _told(app, replay_app(backend, app, to_round=to_round, from_offsets=_offsets(offsets)))


@command.command("resume")
@click.argument("app")
@click.option("--partition", metavar="FLOW:P|TOPIC-P", required=True, help="The stopped partition.")
@click.option(
    "--skip-to",
    type=click.IntRange(min=0),
    help="Go on there, at or behind where it stopped; what is skipped is recorded for ever.",
)
@state_option
@verbosity_options
def resume(app: str, partition: str, skip_to: int | None, state: str) -> None:
    """Go on with a partition of APP that a fault stopped, where it stopped or behind it."""
    from tidegate.pipeline.admin import resume_partition

    with opened_backend(state, read_only=False) as backend:
        _told(app, resume_partition(backend, app, partition, skip_to=skip_to))


@command.command("acknowledge")
@click.argument("app")
@state_option
@verbosity_options
def acknowledge(app: str, state: str) -> None:
    """Say that the faults that APP found so far are known; run and status end with 0 again until a new one comes."""
    from tidegate.pipeline.admin import acknowledge_faults

    with opened_backend(state, read_only=False) as backend:
        _told(app, acknowledge_faults(backend, app))


@command.command("rebase")
@click.argument("app")
@click.option("--log", "log_url", metavar="URL", envvar="TIDEGATE_LOG", required=True, help="The app's log.")
@command_options
@state_option
@yes_option
@verbosity_options
def rebase(
    app: str,
    log_url: str,
    command_config: str | None,
    command_properties: dict[str, str],
    state: str,
    yes: bool,
) -> None:
    """Let APP go on where its output topics end now, after something else wrote into them."""
    from tidegate.pipeline.admin import rebase_outputs

    confirm(f"let app {app} write behind records that are not its own?", yes)
    at = LogAddress(log_url, command_config, command_properties)
    with opened_backend(state, read_only=False) as backend, at.open(read_only=True) as log:
        _told(app, rebase_outputs(backend, app, log))


def _offsets(given: tuple[str, ...]) -> dict[str, dict[int, int]] | None:
    found: dict[str, dict[int, int]] = {}
    for each in given:
        place, _, offset = each.partition("=")
        flow, _, number = place.rpartition(":")
        if not flow or not number.isdigit() or not offset.isdigit():
            raise click.UsageError(
                f"--from-offset {each}: say FLOW:PARTITION=OFFSET, like orders-per-minute:0=1200"
            )
        found.setdefault(flow, {})[int(number)] = int(offset)
    return found or None


def _told(app: str, made: CommitInfo) -> None:
    say(f"app {app}: {made.change}; commit {made.round}")
    print_object({"app": app, "round": made.round, "change": made.change}, format="jsonl")
