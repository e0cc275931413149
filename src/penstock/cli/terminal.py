"""What commands share at a terminal: where they print, and how a signal ends them."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from penstock.core.errors import ConfigError, unwritable
from penstock.core.printable import printable_lines

PIPED_WIDTH: Final = 1000
"""Columns where nothing is known of a terminal. Chosen: longer than any line, so that none is wrapped or cut."""


class Terminal(Console):
    """A console whose texts, however they are arranged, show control characters by their escapes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed; rich's own sequences are not text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable_lines(text), style, control)


def printer() -> Terminal:
    """Return a console on stdout."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=PIPED_WIDTH)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], **columns: Any) -> Table:
    """Return a table without lines; ``columns`` go to each of rich's columns."""
    made = Table(box=None)
    for heading in headings:
        made.add_column(heading, **columns)
    for row in rows:
        made.add_row(*row)
    return made


def write_text(what: str, path: Path, text: str) -> None:
    """Write a file that ``what`` names on the command line."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(unwritable(what, exc)) from exc


_T = TypeVar("_T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_interruptible(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main``; the first SIGINT, SIGTERM or SIGHUP cancels it, later ones do not disturb its clearing up.

    A signal that comes after ``main`` has returned is ignored, for its effect is to stay. SIGHUP stays ignored
    where the caller ignores it, as nohup does.

    Raises:
        SystemExit: a signal came; 128 and its number, as shells count.
    """
    received: list[signal.Signals] = []
    try:
        return asyncio.run(_cancelled_by_signals(main, received))
    except asyncio.CancelledError:
        if not received:
            raise
        sys.exit(128 + received[0])


async def _cancelled_by_signals(main: Coroutine[Any, Any, _T], received: list[signal.Signals]) -> _T:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(main)

    def on_signal(number: signal.Signals) -> None:
        if not received:
            task.cancel()
        received.append(number)

    before = {each: signal.getsignal(each) for each in _SIGNALS}
    handled = {number: kept for number, kept in before.items() if kept is not signal.SIG_IGN}
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    after: dict[signal.Signals, Any] = handled
    try:
        result = await task
        after = dict.fromkeys(handled, signal.SIG_IGN)
    finally:
        for number, kept in after.items():
            loop.remove_signal_handler(number)
            signal.signal(number, kept)
    return result
