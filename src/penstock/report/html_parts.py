"""Parts of a self-contained HTML page without scripts or network access, for the report and the simulator."""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_STYLE = """
/* Pictures are drawn on white, so they keep a white ground in the dark. */
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1b1b; --soft: #555; --line: #ddd; --warn: #fff4d6; --bad: #fde4e4; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --ink: #e7ebf0; --soft: #9aa5b1; --line: #363d46; --warn: #3b3013; --bad: #441a1a; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; display: block; max-width: 100%; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .7rem; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.result { font-size: 1.2rem; font-weight: 600; }
.mark { background: var(--warn); border-left: .4rem solid #e69f00; padding: .5rem 1rem; margin: .5rem 0; }
.mark.bad { background: var(--bad); border-color: #a00000; font-weight: 600; }
figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; } figcaption { color: var(--soft); font-size: .9rem; }
@media (max-width: 40rem) { th, td { padding: .2rem .3rem; font-size: .8rem; } }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return a complete HTML document with a title and a body of HTML parts."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{text(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def text(value: object) -> str:
    """Return a value as HTML-escaped text."""
    return html.escape(str(value))


def figure(path: Path, captions: Mapping[str, str]) -> str:
    """Return a PNG file as an inline HTML picture.

    Args:
        path: File to read.
        captions: Captions by file name; a picture without one has its file name as the caption.
    """
    data = b64encode(path.read_bytes()).decode()
    caption = text(captions.get(path.name, path.stem))
    return f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'


def pairs(rows: Iterable[tuple[str, object]]) -> str:
    """Return an HTML table with two columns, keys and values; a value that is a list is shown as several lines."""
    cells = "".join(f"<tr><th>{text(key)}</th><td>{_value(value)}</td></tr>" for key, value in rows)
    return f"<table>{cells}</table>"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, texts: int = 1) -> str:
    """Return an HTML table.

    Args:
        heads: Column headings.
        rows: Cells of each row.
        texts: Number of text columns, from the left; the others are right-aligned numbers.
    """
    lines = [("th", heads), *(("td", row) for row in rows)]
    body = "".join(
        "<tr>"
        + "".join(
            f"<{tag}{'' if place < texts else ' class=n'}>{text(cell)}</{tag}>"
            for place, cell in enumerate(cells)
        )
        + "</tr>"
        for tag, cells in lines
    )
    return f"<table>{body}</table>"


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "<br>".join(text(item) for item in value) or "none"
    if isinstance(value, dict):
        return text(", ".join(f"{key} {item}" for key, item in value.items()) or "none")
    return text(value)
