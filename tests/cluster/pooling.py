"""What the tests of GPU pools share."""

from __future__ import annotations

import asyncio


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
