"""Reads a file of lines as another process appends to it: a ledger, the results of a load run."""

from __future__ import annotations

from pathlib import Path


class LineFollower:
    """Gives each line once; a torn last line is given when it is whole."""

    __slots__ = ("_first_read_bytes", "_offset", "_path")

    def __init__(self, path: Path, *, first_read_bytes: int | None = None) -> None:
        """Name the file, which may come later.

        Args:
            path: The file.
            first_read_bytes: How far back the first read reaches, bytes; None reads from the beginning. The
                first line may then lack its beginning.
        """
        self._path = path
        self._first_read_bytes = first_read_bytes
        self._offset: int | None = None

    def new_lines(self) -> list[bytes]:
        """Return the lines that have become whole since the last call, without their line ends.

        A file that has shrunk is read as a new one; one that cannot be read has no lines.
        """
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if self._offset is None or self._offset > size:
                    back = size if self._first_read_bytes is None else self._first_read_bytes
                    self._offset = max(0, size - back)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()
