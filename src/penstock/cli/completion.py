"""`penstock completion`: the script with which a shell completes commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL, to be read when it starts.

    Example: echo 'eval "$(penstock completion bash)"' >> ~/.bashrc
    """
    script = get_completion_class(shell)
    assert script is not None  # noqa: S101 - the choice names only click's own
    click.echo(script(context.find_root().command, {}, "penstock", "_PENSTOCK_COMPLETE").source())
