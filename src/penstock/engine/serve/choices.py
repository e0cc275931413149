"""Joins the choices of one response (``n``), each of which the engine computes as a request of its own; used by `streams`. Pure."""

from __future__ import annotations

from dataclasses import replace

import orjson

from penstock.engine.serve.answers import Finished


class ChoiceTally:
    """Counts the choices of one response that have not ended, and joins their bodies and token counts.

    As in vLLM, the prompt counts once and the output tokens of all choices are added.
    """

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._done: dict[int, Finished] = {}
        self._bodies: dict[int, bytes] = {}

    def end_stream(self, choice: int, done: Finished) -> Finished | None:
        """Record that the stream of a choice has ended; return the counts of the entire response after the last choice, else None.

        Args:
            choice: Index of the choice.
            done: Result of the choice.
        """
        self._done[choice] = done
        if len(self._done) < self._choices:
            return None
        output_tokens = sum(each.output_tokens for each in self._done.values())
        return replace(done, output_tokens=output_tokens, cached_tokens=self._done[0].cached_tokens)

    def end_complete(self, choice: int, body: bytes) -> bytes | None:
        """Record the body of a choice; return the body of the entire response after the last choice, else None.

        Args:
            choice: Index of the choice.
            body: JSON body of a response with this choice only.
        """
        self._bodies[choice] = body
        if len(self._bodies) < self._choices:
            return None
        if self._choices == 1:
            return body
        first, *others = (orjson.loads(self._bodies[each]) for each in range(self._choices))
        usage = first["usage"]
        for other in others:
            first["choices"] += other["choices"]
            usage["completion_tokens"] += other["usage"]["completion_tokens"]
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return orjson.dumps(first)
