"""`tidegate ui`: the page and the HTTP API over one data folder, read-only. Thin over `tidegate.web`."""

from __future__ import annotations

from pathlib import Path

import click

from tidegate.cli.options import Verb, talk_options
from tidegate.cli.output import say
from tidegate.errors import InvalidError


@click.command("ui", cls=Verb)
@click.argument("data", type=click.Path(path_type=Path), default="./data")
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
@talk_options
def command(
    data: Path, host: str, port: int, token_file: Path | None, names: tuple[str, ...], opens: bool
) -> None:
    """See topics, records, integrity, tables and apps in a browser; the same as JSON under /api.

    DATA is an app's data folder (with log and state in it), a log folder, or any Kafka data folder. Nothing is
    ever written. Without DATA: ./data.

    \b
    tidegate ui
    tidegate ui /var/lib/kafka/data --port 9000 --open
    tidegate ui ./data --host 0.0.0.0 --allow-host tides.example.com --token-file token
    """
    serve_page(data, host, port, token_file, names, opens)


def serve_page(
    data: Path,
    host: str = "127.0.0.1",
    port: int = 8421,
    token_file: Path | None = None,
    names: tuple[str, ...] = (),
    opens: bool = False,
) -> None:
    """Serve until interrupted."""
    try:
        from tidegate.web.server import serve
    except ImportError as error:
        if error.name is not None and error.name.startswith("tidegate"):
            raise
        raise InvalidError("the page needs its extra: pip install 'tidegate[web]', then try again") from None
    from tidegate.web.settings import Settings, folders_of, read_token

    log, state = folders_of(data)
    token = None if token_file is None else read_token(token_file)
    settings = Settings(log, state, host, port, token, names)

    def ready(address: str) -> None:
        say(f"look at {address} (Ctrl-C ends it)")
        if opens:
            import webbrowser

            webbrowser.open(address)

    serve(settings, ready=ready)
