"""`penstock make-model`: a small model with random weights, for trying real engines."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import fields
from penstock.cli.say import say
from penstock.local.random_model import RandomModel, write_model


@click.command(name="make-model")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@fields.options(RandomModel)
@click.option("--replace", is_flag=True, help="Replace another model in FOLDER.")
def make_model(folder: Path, *, replace: bool, **sizes: int) -> None:
    """Write a small Llama with random weights, tokenizer and chat template to FOLDER; nothing is downloaded.

    Equal options give equal files; another model in FOLDER is refused. Its answers make no sense, but depend on every token of the prompt.

    Example: penstock make-model tiny-model && penstock up manifests/samples/vllm-cpu.yaml
    """
    for path in write_model(folder, RandomModel(**sizes), replace=replace):
        say(f"{path}  {path.stat().st_size:,} bytes")
