"""Structured logs on stderr: constant event text plus keys, as one JSON object or one plain line per event."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

_task_keys: ContextVar[Mapping[str, Any]] = ContextVar("task_keys", default={})  # noqa: B039 - never changed


def bind_task(**keys: Any) -> None:
    """Add ``keys`` to every event that is logged by the current task, and by tasks that it starts afterwards."""
    _task_keys.set({**_task_keys.get(), **keys})


class EventLogger:
    """Logs events with keys, for example ``log.info("worker ready", worker="llama_decode")``."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **keys: Any) -> None:
        """Log details per request or tick at level DEBUG; nothing is formatted if DEBUG is off."""
        if self._logger.isEnabledFor(logging.DEBUG):
            self._log(logging.DEBUG, event, keys)

    def info(self, event: str, **keys: Any) -> None:
        """Log a change of a lifecycle or decision at level INFO."""
        self._log(logging.INFO, event, keys)

    def warning(self, event: str, **keys: Any) -> None:
        """Log degraded operation at level WARNING."""
        self._log(logging.WARNING, event, keys)

    def error(self, event: str, **keys: Any) -> None:
        """Log a failure that needs attention at level ERROR."""
        self._log(logging.ERROR, event, keys)

    def exception(self, event: str, **keys: Any) -> None:
        """Log a failure with the current traceback; use it only in the outermost handler of a task."""
        bound = {**_task_keys.get(), **keys}
        self._logger.error(event, exc_info=True, extra={"keys": bound})  # noqa: LOG014 - called inside handlers

    def _log(self, level: int, event: str, keys: dict[str, Any]) -> None:
        self._logger.log(level, event, extra={"keys": {**_task_keys.get(), **keys}})


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        keys = getattr(record, "keys", None)
        if keys:
            text += " " + " ".join(f"{key}={value!r}" for key, value in keys.items())
        return text


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "keys", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def get_logger(name: str) -> EventLogger:
    """Return the event logger of a module; ``name`` is the module's ``__name__``."""
    return EventLogger(logging.getLogger(name))


def configure(level: str = "info", *, as_json: bool = False) -> None:
    """Send all logs to stderr; the command line calls it once.

    Args:
        level: Minimum level, such as ``info``.
        as_json: Whether each event is a JSON object instead of a plain line.
    """
    handler = logging.StreamHandler(sys.stderr)
    plain = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(_JsonFormatter() if as_json else _PlainFormatter(plain))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # httpx logs every call at INFO; callers log failures themselves.
    logging.getLogger("httpx").setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
