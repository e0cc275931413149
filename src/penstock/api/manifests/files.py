"""Reads a manifest's text from a file, bounded, with an error for every way that can fail."""

from __future__ import annotations

from pathlib import Path

from penstock.core.errors import InvalidSpecError, Problem

MAX_FILE_BYTES = 1 << 20
"""1 MiB; Kubernetes' own store refuses objects of more than 1.5 MiB."""


def read_text(path: Path) -> str:
    """Return the text of a manifest file.

    Raises:
        InvalidSpecError: The file is missing, unreadable, a folder, too large or not UTF-8.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise _refusal(path, "there is no such file; check the path") from None
    except IsADirectoryError:
        raise _refusal(path, "is a folder; name the manifest file in it") from None
    except PermissionError:
        raise _refusal(path, "may not be read; change its permissions") from None
    except (OSError, ValueError) as exc:
        raise _refusal(path, f"cannot be read: {exc}") from exc
    if len(data) > MAX_FILE_BYTES:
        raise _refusal(path, f"is larger than {MAX_FILE_BYTES} bytes; no manifest needs that")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        message = f"byte {exc.start} (0x{data[exc.start]:02x}) is not UTF-8; save the file as UTF-8"
        raise InvalidSpecError([Problem(path="", message=message, file=str(path), line=line)]) from exc


def _refusal(path: Path, message: str) -> InvalidSpecError:
    return InvalidSpecError([Problem(path="", message=message, file=str(path))])
