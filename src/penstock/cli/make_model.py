"""`penstock make-model`: a small model with random weights, for trying real engines."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.local.random_model import MIN_VOCABULARY, RandomModel, write_model


@click.command(name="make-model")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--layers",
    type=click.IntRange(1, 128),
    default=2,
    show_default=True,
    help="How many decoder layers, 1 to 128.",
)
@click.option(
    "--hidden-size",
    type=click.IntRange(80, 8000),
    default=160,
    show_default=True,
    help="How many values a token has, a multiple of 80 up to 8000; more are slower.",
)
@click.option(
    "--context-tokens",
    type=click.IntRange(1, 1 << 20),
    default=2048,
    show_default=True,
    help="Most tokens of prompt plus output.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=7, show_default=True, help="Seed of the random weights."
)
@click.option(
    "--vocabulary",
    type=click.IntRange(MIN_VOCABULARY, 1 << 18),
    default=MIN_VOCABULARY,
    show_default=True,
    help="How many tokens the tokenizer knows; Dynamo's mocker answers with ids up to 2000.",
)
@click.option("--replace", is_flag=True, help="Replace another model in FOLDER.")
def make_model(folder: Path, *, replace: bool, **sizes: int) -> None:
    """Write a small Llama with random weights, tokenizer and chat template to FOLDER; nothing is downloaded.

    Equal options give equal files; another model in FOLDER is refused. Its answers make no sense, but depend on every token of the prompt.

    Example: penstock make-model tiny-model && penstock up manifests/samples/vllm-cpu.yaml
    """
    for path in write_model(folder, RandomModel(**sizes), replace=replace):
        click.echo(f"{path}  {path.stat().st_size:,} bytes")
