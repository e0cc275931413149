"""What the tests of GPU pools share."""

from __future__ import annotations

import asyncio

from operating import until


class DyingClient:
    """A client whose process dies at a write: just before the API server gets it, or just before it hears the answer."""

    def __init__(self, client, *, writes, is_answer_lost):
        self._client, self._left, self._is_answer_lost = client, writes, is_answer_lost
        self.died = asyncio.Event()

    def __getattr__(self, name):
        found = getattr(self._client, name)
        if name not in {"apply", "create", "delete", "patch"}:
            return found

        async def write(*args, **options):
            self._left -= 1
            if self._left < 0 or (self._left == 0 and self._is_answer_lost):
                if self._left == 0:
                    await found(*args, **options)
                self.died.set()
                await asyncio.Event().wait()
            return await found(*args, **options)

        return write


async def die_at_each_step(client, operating, moved):
    """Let operators die at their first to fourth write, one after the other, until GPUs have moved; return how many died.

    Args:
        client: Of the API server.
        operating: Runs an operator with a client.
        moved: Returns whether the GPUs have moved.
    """
    deaths = 0
    for life in range(60):
        dying = DyingClient(client, writes=1 + life // 2 % 4, is_answer_lost=bool(life % 2))
        async with operating(dying):

            async def ended(dying=dying):
                return dying.died.is_set() or await moved()

            await until(ended, "the next death, or the end")
        if not dying.died.is_set():
            break
        deaths += 1
    async with operating(client):
        await until(moved, "the KV transfer")
    return deaths
