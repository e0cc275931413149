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

    The same options give the same files; if FOLDER holds another model, the command refuses. The model's answers make
    no sense, but they depend on every token of the prompt.

    Example: penstock make-model tiny-model && penstock up manifests/samples/vllm-cpu.yaml
    """
    for path in write_model(folder, RandomModel(**sizes), replace=replace):
        say(f"{path}  {path.stat().st_size:,} bytes")
