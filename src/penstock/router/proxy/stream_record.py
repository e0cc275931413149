"""Records what a worker has sent of a stream, for the worker that may resume it; memory is limited over all streams. Pure.

The relay passes on each read. The record checks and parses the reads in batches, once, and keeps text, counts and token ids
instead of events: resuming or moving a stream therefore never parses more than the last batch, however long the stream is. A
stream with an event of an unknown form cannot be resumed, and nothing more of it is kept.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from types import NoneType
from typing import Any, Final

import orjson

from penstock.core.http.sse import EventSplitter, payload
from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.not_resumable import (
    ENDING,
    NOT_KEPT,
    STARTED_PART,
    UNKNOWN,
    NotResumable,
)
from penstock.router.proxy.routes import ApiEndpoint

RECORDED_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the records of all streams. Chosen: a thousand streams of 12,000 tokens."""

BATCH: Final = 128
"""Number of reads, or of tokens, that are parsed at once. Chosen: parsing them takes about 20 us, and a short stream is never
parsed."""

LARGE_READ_BYTES: Final = 4096
"""Size of a read from which on it is parsed at once. Chosen: twenty times a usual event."""

_ID: Final = "I"
"""Of an array of ids: 32 bits each."""
PROMPT_IDS: Final = "prompt_token_ids"
_TEXT_KEYS: Final = frozenset(
    {"role", "content", "index", "logprobs", "finish_reason", "stop_reason", "text", "token_ids", PROMPT_IDS}
)
_HEAD_KEYS: Final = ("id", "created", "model", "object")
_DONE: Final = b"[DONE]"
# Tuples, because a union would be created again for each event.
_OPTIONAL_STR: Final = (str, NoneType)
_OPTIONAL_LIST: Final = (list, NoneType)
_OPTIONAL_DICT: Final = (dict, NoneType)
_STRING_BODY: Final = re.compile(rb'(?:[^"\\]|\\.)*')


@dataclass(slots=True)
class RecordedBytes:
    """Size of the records of all streams of a router; at most 64 MiB (`RECORDED_BYTES`).

    Attributes:
        recorded_bytes: Present size in bytes.
    """

    recorded_bytes: int = 0


@dataclass(slots=True)
class _Run:
    """Texts of consecutive events with the same number of tokens each, and the counts before them."""

    tokens: int
    characters: int
    event_tokens: int
    texts: list[str]

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of tokens and characters sent after each event with text, the last event first."""
        ends = list(accumulate(map(len, self.texts), initial=self.characters))
        for at in range(len(self.texts) - 1, -1, -1):
            if self.texts[at]:
                yield self.tokens + (at + 1) * self.event_tokens, ends[at + 1]


class StreamRecord:
    """The record of what a client has received of one stream, by which another worker can resume the stream.

    If the stream was resumed before, the record contains only what the present worker has sent; `EmittedPrefix` contains the
    text before that. If all records of the router together would exceed 64 MiB
    (`RECORDED_BYTES`), this one is deleted, and the stream cannot be resumed. ``total`` is the size of all records, and
    ``tokens_per_event`` the number of tokens that the engine sends in one event.

    Attributes:
        append: Adds one read of complete events, without HTTP framing. It takes a few nanoseconds and parses nothing; the
            caller must call `read` every 128 reads (`BATCH`).
        unread: Reads (bytes of complete events) that were added and not parsed yet.
        request: Request of the client.
        by_tokens: Whether the router asks for token ids, so that the next worker can get the ids of the prompt and the text
            as its prompt.
        tokens: Number of tokens of the recorded text.
        characters: Number of characters of the recorded text.
        head: Keys of the events, with their values (``id``, ``model`` and so on), that the events of the next worker must
            repeat.
        finish_reason: Finish reason of the response; None if the event with the reason has not come.
        has_usage: Whether the event with the usage has come.
        token_ids: Token ids of the recorded text, if the events contain them.
        prompt_ids: Token ids of the prompt, if the events contain them.
    """

    __slots__ = (
        "_bound_bytes",
        "_end",
        "_held",
        "_id_bytes",
        "_middle",
        "_new_texts",
        "_problem",
        "_recorded_bytes",
        "_run",
        "_runs",
        "_start",
        "_texts",
        "_tokens_per_event",
        "_total",
        "append",
        "by_tokens",
        "characters",
        "finish_reason",
        "has_usage",
        "head",
        "prompt_ids",
        "request",
        "token_ids",
        "tokens",
        "unread",
    )

    def __init__(
        self,
        request: CompletionRequest,
        total: RecordedBytes,
        *,
        tokens_per_event: int = 1,
        by_tokens: bool = False,
        bound_bytes: int = RECORDED_BYTES,
    ) -> None:
        self.request = request
        self.by_tokens = by_tokens
        self._total = total
        self._bound_bytes = bound_bytes
        self._tokens_per_event = tokens_per_event
        self._held = max((len(stop) - 1 for stop in stops_of(request)), default=0)
        self.unread: list[bytes] = []
        self._recorded_bytes = 0
        self._problem: NotResumable | None = None
        self.append: Callable[[bytes], object] = self.unread.append
        self._clear()

    def _clear(self) -> None:
        self.unread.clear()
        self._texts: list[str] = []
        self._id_bytes = 0
        self._runs: deque[_Run] = deque()
        self._run: _Run | None = None
        self._new_texts: list[str] = []
        self._start = self._middle = self._end = b""
        self.tokens = self.characters = 0
        self.head: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.has_usage = False
        self.token_ids = array(_ID)
        self.prompt_ids = array(_ID)

    def drop(self) -> None:
        """Delete the recorded part of the stream, because the stream has ended or another worker resumes it."""
        self._total.recorded_bytes -= self._recorded_bytes
        self._recorded_bytes = 0
        self._clear()

    def _give_up(self, problem: NotResumable) -> None:
        self.drop()
        self._problem = problem
        self.append = _forget

    def read(self) -> None:
        """Parse and record the reads that were added by `append` since the last call."""
        if not self.unread:
            return
        data = b"".join(self.unread)
        self.unread.clear()
        try:
            if not self._read_run(data):
                self._read_events(EventSplitter(max_event_bytes=len(data)).feed(data))
        except _NotResumable as found:
            self._give_up(found.why)
            return
        self._end_batch()

    def problem(self) -> NotResumable | None:
        """Return the reason in the recorded events for which another worker cannot resume the stream; None if there is none.

        Reads that were not parsed yet are parsed first.
        """
        self.read()
        return self._problem

    def text(self) -> str:
        """Return the text of the stream that was recorded since its present worker began to send."""
        return "".join(self._texts)

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield, for each recorded event with text from the newest to the oldest, two numbers of the text up to the event's end.

        They are the number of tokens and the number of characters. The caller looks for the newest event after which the text
        can be cut, so that another worker resumes the stream there. The iteration stops after an event at which the text can
        certainly be cut.
        """
        for run in reversed(self._runs):
            yield from run.steps()

    # ------------------------------------------------------------------ reading

    def _read_events(self, events: Sequence[bytes]) -> None:
        """Record events in order; sequences of usual events are parsed at once."""
        run: list[bytes] = []
        for event in events:
            if self._start and event.startswith(self._start) and event.endswith(self._end):
                run.append(event)
                continue
            self._read_each(run)
            run.clear()
            self._read_event(event)
        self._read_each(run)

    def _read_each(self, run: Sequence[bytes]) -> None:
        if run and not self._read_run(b"".join(run)):
            for event in run:
                self._read_event(event)

    def _read_run(self, data: bytes) -> bool:
        """Record events that differ only in their text and token ids; return False, and record nothing, if there are other events.

        The bytes between the texts are the same each time. They are replaced by the separator of list items, so that the
        texts of all events become one JSON list. If a text is not a string, or is followed by another key, the result is not
        a list or has another length.
        """
        start, end = self._start, self._end
        if not start or not self.tokens or not (data.startswith(start) and data.endswith(end)):
            return False
        # `rsplit`, because `split` first prepares itself for separators of this length, which takes longer than the search.
        parts = data[len(start) : -len(end)].rsplit(end + start)
        if self._middle:
            return self._read_with_ids(parts)
        try:
            texts = orjson.loads(b'["' + b'","'.join(parts) + b'"]')
        except orjson.JSONDecodeError:
            return False
        if len(texts) != len(parts) or set(map(type, texts)) != {str}:
            return False
        self._add(texts, 0)
        return True

    def _read_with_ids(self, parts: Sequence[bytes]) -> bool:
        """Record texts with their token ids in the same way; ``_middle`` contains the bytes between the two."""
        joined = b'",['.join(b'],"'.join(parts).rsplit(self._middle))
        try:
            items = orjson.loads(b'["' + joined + b"]]")
        except orjson.JSONDecodeError:
            return False
        texts, ids = items[::2], items[1::2]
        if len(items) != 2 * len(parts) or {*map(type, texts)} != {str} or {*map(type, ids)} != {list}:
            return False
        self.token_ids.extend(_checked_ids([*chain.from_iterable(ids)]))
        counts = {*map(len, ids)}
        if len(counts) == 1:
            self._add(texts, counts.pop())
        else:
            for text, each in zip(texts, ids, strict=True):
                self._add([text], len(each))
        return True

    def _learn_usual(self, event: bytes, chunk: Any) -> None:
        """Remember the bytes before and after an event's text and ids, because most events of a stream differ only in these."""
        self._start = b""
        choice = chunk["choices"][0]
        shown = choice.get("delta", choice)
        key = b'"content":' if "delta" in choice else b'"text":'
        at = event.find(key)
        if at < 0 or event.count(key) != 1 or event[:6] != b"data: " or not event.endswith(b"}\n\n"):
            return
        begin = event.find(b'"', at + len(key)) + 1
        body = _STRING_BODY.match(event, begin)
        if body is None:
            return
        start, middle, end = event[:begin], b"", event[body.end() :]
        shown["content" if "delta" in choice else "text"], probe = "?", start[6:] + b"?" + end
        if choice.get("token_ids"):
            before, ids_key, after = end.partition(b'"token_ids":[')
            middle, end = before + ids_key, after[after.find(b"]") :]
            choice["token_ids"], probe = [7], start[6:] + b"?" + middle + b"7" + end
        # The positions of text and ids are correct if replacing them changes nothing else in the parsed event.
        try:
            is_found = orjson.loads(probe) == chunk
        except orjson.JSONDecodeError:
            is_found = False
        if is_found:
            self._start, self._middle, self._end = start, middle, end

    def _read_event(self, event: bytes) -> None:
        data = payload(event)
        if data is None or data == _DONE:
            return
        try:
            chunk: Any = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise _NotResumable(UNKNOWN) from None
        _check(isinstance(chunk, dict))
        if self.request.endpoint is ApiEndpoint.RESPONSES:
            self._read_response_event(chunk)
            return
        if self.request.endpoint is ApiEndpoint.MESSAGES and "choices" not in chunk:
            self._read_message_event(chunk)
            return
        choices, usage = chunk.get("choices"), chunk.get("usage")
        _check(isinstance(choices, list) and isinstance(usage, _OPTIONAL_DICT))
        self.head = self.head or {key: chunk[key] for key in _HEAD_KEYS if key in chunk}
        self._read_prompt(chunk.get(PROMPT_IDS))  # a chat has them here, a completion at its choice
        self.has_usage |= not choices and bool(usage)
        for choice in choices:
            text = self._read_choice(choice)
            if text and len(choices) == 1 and not choice.get("logprobs"):
                self._learn_usual(event, chunk)

    def _read_choice(self, choice: Any) -> str:
        """Record a choice, and return its text."""
        _check(isinstance(choice, dict) and choice.get("index", 0) == 0)
        delta, reason = choice.get("delta", choice), choice.get("finish_reason")
        _check(isinstance(delta, dict) and isinstance(reason, _OPTIONAL_STR))
        text = delta.get("content" if "delta" in choice else "text")
        ids = choice.get("token_ids")
        _check(isinstance(text, _OPTIONAL_STR) and isinstance(ids, _OPTIONAL_LIST))
        if any(value and key not in _TEXT_KEYS for key, value in delta.items()):
            raise _NotResumable(STARTED_PART)
        self._read_prompt(choice.get(PROMPT_IDS))
        self.finish_reason = reason or self.finish_reason
        if ids:
            self.token_ids.extend(_checked_ids(ids))
        tokens = len(ids or ()) or _logprob_count(choice)
        if "role" not in delta or text:
            self._add([text or ""], tokens)
        return text or ""

    def _read_prompt(self, ids: Any) -> None:
        """Record the ids of the prompt, which come once."""
        _check(isinstance(ids, _OPTIONAL_LIST))
        if ids and not self.prompt_ids:
            self.prompt_ids.extend(_checked_ids(ids))

    def _read_response_event(self, chunk: Any) -> None:
        kind, number, head = chunk.get("type"), chunk.get("sequence_number"), self.head
        _check(isinstance(kind, str) and kind.startswith("response.") and type(number) in {int, NoneType})
        if kind == "response.created":
            made = chunk.get("response")
            _check(isinstance(made, dict))
            head |= {key: made.get(key) for key in ("id", "created_at", "max_output_tokens")}
        elif kind == "response.output_item.added":
            item = chunk.get("item")
            _check(isinstance(item, dict))
            if "item_id" in head or item.get("type") != "message":
                raise _NotResumable(STARTED_PART)
            head["item_id"] = item.get("id")
        elif kind == "response.output_text.delta":
            text = chunk.get("delta")
            _check(isinstance(text, _OPTIONAL_STR))
            self._add([text or ""], 0)
        elif kind.endswith(".delta"):
            raise _NotResumable(STARTED_PART)
        elif kind not in {"response.in_progress", "response.content_part.added"}:
            raise _NotResumable(ENDING)
        head["sequence_number"] = number

    def _read_message_event(self, chunk: Any) -> None:
        """Parse an event of Anthropic's API; the rest of such a stream comes as a chat's chunks."""
        kind = chunk.get("type")
        if kind == "content_block_start":
            block = chunk.get("content_block")
            _check(isinstance(block, dict))
            if block.get("type") != "text" or chunk.get("index") != 0:
                raise _NotResumable(STARTED_PART)
        elif kind == "content_block_delta":
            delta = chunk.get("delta")
            _check(isinstance(delta, dict) and isinstance(delta.get("text", ""), str))
            if delta.get("type") != "text_delta":
                raise _NotResumable(STARTED_PART)
            self._add([delta.get("text", "")], 0)
        elif kind not in {"message_start", "ping"}:
            raise _NotResumable(ENDING)

    # ------------------------------------------------------------------ text

    def _add(self, texts: list[str], tokens: int) -> None:
        """Add the texts of events with this many tokens each; 0 if the events do not contain the number."""
        # Each worker's first token comes in an event of its own, later events contain this many.
        tokens = tokens or (self._tokens_per_event if self.tokens else 1)
        run = self._run
        if run is not None and run.event_tokens == tokens:
            run.texts += texts
        else:
            self._run = _Run(self.tokens, self.characters, tokens, texts)
            self._runs.append(self._run)
        self.tokens += tokens * len(texts)
        text = texts[0] if len(texts) == 1 else "".join(texts)
        self._new_texts.append(text)
        self.characters += len(text)

    def _end_batch(self) -> None:
        """Join the texts of a batch, and update the size of the record."""
        text = "".join(self._new_texts)
        self._new_texts.clear()
        self._run = None
        self._forget_steps()
        if text:
            self._texts.append(text)
        id_bytes = self.token_ids.itemsize * (len(self.token_ids) + len(self.prompt_ids))
        added = text.__sizeof__() + id_bytes - self._id_bytes
        self._id_bytes = id_bytes
        self._recorded_bytes += added
        self._total.recorded_bytes += added
        if self._total.recorded_bytes > self._bound_bytes:
            self._give_up(NOT_KEPT)

    def _forget_steps(self) -> None:
        """Delete the positions of events before one at which the text can be cut, whatever follows."""
        while len(self._runs) > 1 and self._has_cut():
            self._runs.popleft()

    def _has_cut(self) -> bool:
        """Return whether the text can be cut at an event of the second run: after the held-back characters, and not at white space."""
        second, end = self._runs[1], self._held
        if second.characters + end >= self.characters:
            return False
        shown = "".join(chain.from_iterable(each.texts for each in islice(self._runs, 1, None)))
        for text in second.texts:
            end += len(text)
            if end > len(shown):
                return False
            if text and not shown[end - 1].isspace():
                return True
        return False


class _NotResumable(Exception):  # noqa: N818 - no fault of the router's
    """The stream cannot be resumed."""

    def __init__(self, why: NotResumable) -> None:
        super().__init__(str(why))
        self.why = why


def _check(is_known: bool) -> None:  # noqa: FBT001 - the one thing it takes
    if not is_known:
        raise _NotResumable(UNKNOWN)


def _checked_ids(ids: list[Any]) -> array[int]:
    _check(set(map(type, ids)) <= {int})
    try:
        return array(_ID, ids)
    except OverflowError:
        raise _NotResumable(UNKNOWN) from None


def _logprob_count(choice: dict[str, Any]) -> int:
    logprobs = choice.get("logprobs")
    _check(isinstance(logprobs, _OPTIONAL_DICT))
    tokens = (logprobs or {}).get("content") or (logprobs or {}).get("tokens") or []
    _check(isinstance(tokens, list))
    return len(tokens)


def stops_of(request: CompletionRequest) -> Sequence[str]:
    """Return a request's stop strings, at which its response ends; empty if there are none."""
    stop = request.body.get("stop") or ()
    return (stop,) if isinstance(stop, str) else stop


def _forget(_read: bytes) -> None: ...
