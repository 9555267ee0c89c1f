"""`tidegate run`: an app's rounds, on Spark or in this process, with one live line and a summary at the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import click

from tidegate.cli.options import DURATION, Verb, talk_options
from tidegate.cli.output import echo, say, warn
from tidegate.errors import InvalidError, UnavailableError

if TYPE_CHECKING:
    from tidegate.pipeline.definition.app import App
    from tidegate.pipeline.rounds.run import Run


@click.command("run", cls=Verb)
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
@talk_options
def command(
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
    from tidegate.cli.loading import load_app

    if close and not once:
        raise click.UsageError("--close says that the input ends, so it needs --once")
    app = load_app(where)
    if explain:
        echo(app.explain())
        return 0
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


def run_app(app: App, *, engine: str, master: str | None, metrics: str | None, **settings: Any) -> int:
    """Start it, show how it goes, and tell how it ended."""
    from tidegate.cli.run_line import RunLine
    from tidegate.metrics import Metrics

    counted = Metrics()
    if metrics is not None:
        _serve(counted, metrics)
    chosen = _engine(engine, master, app.name)
    with RunLine() as line:
        run = app._opened(chosen, metrics=counted, progress=line.show, **settings)
        code = 0
        try:
            try:
                run.begin()
                summary = _waited(run)
            except (
                KeyboardInterrupt,
                SystemExit,
            ) as asked:  # Ctrl-C, or SIGTERM of whoever runs services here
                code = 130 if isinstance(asked, KeyboardInterrupt) else int(asked.code or 0)
                line.clear()
                say("stopping after this round; once more to stop at once")
                run.stop()
                summary = _waited(run)
        finally:
            if run.is_running:  # a second interrupt, wherever it came
                _end_now(run, code or 130)
        line.end(summary)
    return code or int(summary.exit_code)


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
    return run.wait()


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
