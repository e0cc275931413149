"""How a long command shows that it is alive: drawn on a terminal, elsewhere a line every some seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.cli.terminal import Terminal

LINE_EVERY_S: Final = 10.0
"""Real seconds between two lines. Chosen: a person waits this long without doubt, and an hour's log stays short."""


@contextmanager
def counting(what: str, total: int, *, is_quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show on stderr how many of ``total`` are done; gives what is called with their number.

    Args:
        what: What is counted, in the plural.
        total: How many there are.
        is_quiet: Show nothing.
    """
    console = Terminal(stderr=True, quiet=is_quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done = 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)

        def show(number: int) -> None:
            nonlocal done
            done = number
            progress.update(task, completed=number)

        with _lines(console, lambda: f"{done} of {total} {what} done"):
            yield show


@contextmanager
def working(words: str, console: Terminal, *, at_once: bool = True) -> Iterator[Callable[[str], None]]:
    """Show what is being done where it cannot be counted; gives what is called with new words.

    Where this is not a terminal, the first words are printed now or, unless ``at_once``, with the first new ones: what is
    refused before has not begun.
    """
    is_printed = console.is_terminal or at_once
    if at_once and not console.is_terminal:
        console.print(words, highlight=False, markup=False, soft_wrap=True)

    def show(changed: str) -> None:
        nonlocal words, is_printed
        if not is_printed:
            is_printed = True
            console.print(words, highlight=False, markup=False, soft_wrap=True)
        words = changed
        status.update(changed)

    with console.status(words) as status, _lines(console, lambda: words):
        yield show


@contextmanager
def _lines(console: Terminal, words: Callable[[], str]) -> Iterator[None]:
    """Print ``words`` and the time since the beginning repeatedly, from a thread; on a terminal nothing."""
    if console.is_terminal or console.quiet:
        yield
        return
    ended, began_s = threading.Event(), time.monotonic()

    def repeat() -> None:
        while not ended.wait(LINE_EVERY_S):
            line = f"{words()} ({time.monotonic() - began_s:.0f} s)"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    thread = threading.Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
