"""`tidegate ui`: serve the web page and the HTTP API over a data folder or a cluster, read-only."""

from __future__ import annotations

from pathlib import Path

import click

from tidegate.cli.options import Command, client_settings, verbosity_options
from tidegate.cli.output import say
from tidegate.errors import InvalidError


@click.command("ui", cls=Command)
@click.argument("data", type=click.Path(path_type=Path), default="./data")
@click.option(
    "--log",
    "log_url",
    metavar="URL",
    help="Another log than DATA's: a folder, or kafka://HOST:PORT.",
)
@click.option(
    "--state",
    "state_url",
    metavar="URL",
    help="Another state than DATA's: a folder, or s3://BUCKET/PATH.",
)
@click.option(
    "--command-config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="A properties file with settings of the Kafka client (the place for secrets).",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; others than loopback need a token.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8421, show_default=True, help="0 takes a free one."
)
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A file with the token that is asked for; mode 0600.",
)
@click.option(
    "--allow-host",
    "names",
    metavar="NAME",
    multiple=True,
    help="A further name browsers may use (repeatable).",
)
@click.option("--open", "opens", is_flag=True, help="Open a browser.")
@verbosity_options
def command(
    data: Path,
    log_url: str | None,
    state_url: str | None,
    command_config: str | None,
    host: str,
    port: int,
    token_file: Path | None,
    names: tuple[str, ...],
    opens: bool,
) -> None:
    """See topics, records, integrity, tables and apps in a browser; the same as JSON under /api.

    DATA is an app's data folder (with log and state in it), a log folder, or any Kafka data folder. Nothing is
    ever written. Without DATA: ./data. With --log kafka://HOST:PORT topics and records are a cluster's; tables and
    apps are those of DATA, if it is there, or of --state.

    \b
    tidegate ui
    tidegate ui --log kafka://localhost:9092 --state s3://bucket/shop
    tidegate ui /var/lib/kafka/data --port 9000 --open
    tidegate ui ./data --host 0.0.0.0 --allow-host tides.example.com --token-file token
    """
    try:
        from tidegate.web.server import serve
    except ImportError as error:
        if error.name is not None and error.name.startswith("tidegate"):
            raise
        raise InvalidError("the page needs its extra: pip install 'tidegate[web]', then try again") from None
    from tidegate.web.settings import Settings, folders_of, log_of, read_token

    log, folder = folders_of(data) if log_url is None else log_of(log_url, data)
    state: Path | str = folder if state_url is None else state_url
    if "://" not in str(state):
        state = Path(state)
    client = {} if command_config is None else client_settings(command_config)
    if client and not isinstance(log, str):
        raise InvalidError(
            "--command-config is for the Kafka client; give --log kafka://HOST:PORT, or leave it out"
        )
    token = None if token_file is None else read_token(token_file)
    settings = Settings(log, state, host, port, token, names, client=client)

    def ready(address: str) -> None:
        say(f"look at {address} (Ctrl-C ends it)")
        if opens:
            import webbrowser

            webbrowser.open(address)

    serve(settings, ready=ready)
