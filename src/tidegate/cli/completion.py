"""`tidegate completion`: what bash, zsh or fish evaluates to complete commands and options."""

from __future__ import annotations

import click

from tidegate.cli.options import Verb, talk_options

_VARIABLE = "_TIDEGATE_COMPLETE"


@click.command("completion", cls=Verb)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@talk_options
def command(shell: str) -> None:
    """Print the script that lets SHELL complete commands, options and their values with the tab key.

    \b
    eval "$(tidegate completion bash)"                                          in ~/.bashrc
    eval "$(tidegate completion zsh)"                                           in ~/.zshrc
    tidegate completion fish > ~/.config/fish/completions/tidegate.fish         once
    """
    from click.shell_completion import get_completion_class

    from tidegate.cli.main import cli

    script = get_completion_class(shell)
    if script is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(script(cli, {}, "tidegate", _VARIABLE).source())
