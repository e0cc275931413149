"""`penstock samples`: list the sample manifests and print one, also where there is no clone of the repository."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.completion import one_of
from penstock.cli.say import say, say_json
from penstock.core.closest import did_you_mean

_PACKAGED = Path(__file__).parent / "data" / "samples"
_IN_CLONE = Path(__file__).parents[3] / "manifests" / "samples"


def sample_files() -> dict[str, Path]:
    """Return the sample manifests by name: the wheel's, or the clone's under an editable install."""
    folder = _PACKAGED if _PACKAGED.is_dir() else _IN_CLONE
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


@click.command()
@click.argument("name", required=False, shell_complete=one_of(lambda _context: sample_files()))
@click.option(
    "--json", "as_json", is_flag=True, help="Print the names and summaries, or the text of NAME, as JSON."
)
def samples(name: str | None, *, as_json: bool) -> None:
    """Print the sample manifest NAME; without NAME, list the samples.

    Example: penstock samples disaggregated > graph.yaml && penstock up graph.yaml
    """
    files = sample_files()
    if name is None and as_json:
        say_json([{"name": each, "summary": _summary(path)} for each, path in files.items()])
        return
    if name is None:
        width = max((len(each) for each in files), default=0)
        for each, path in files.items():
            say(f"{each:<{width}}  {_summary(path)}")
        return
    if name not in files:
        meant = did_you_mean(name, files)
        raise click.BadParameter(f"{name!r} is not one of {', '.join(files)}{meant}", param_hint="NAME")
    text = files[name].read_text(encoding="utf-8")
    if as_json:
        say_json({"name": name, "summary": _summary(files[name]), "text": text})
    else:
        say(text, nl=False)


def _summary(path: Path) -> str:
    comment: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    sentence, _, _ = " ".join(comment).partition(". ")
    return sentence.removesuffix(".")
