"""MkDocs' hook: links from the docs to files alongside them lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Return the page with each relative link out of docs/ made one into the repository: pictures to the file itself."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        path, _, anchor = target.partition("#")
        inside = normpath(PurePosixPath("docs", page.file.src_uri).parent / path)
        if inside.startswith("docs/") or not (_ROOT / inside).exists():
            return link[0]
        kind = "raw" if picture else "tree" if (_ROOT / inside).is_dir() else "blob"
        return f"{picture}[{text}]({config['repo_url']}/{kind}/main/{inside}{'#' + anchor if anchor else ''})"

    return _LINK.sub(absolute, markdown)
