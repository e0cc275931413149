"""Measures how many stream events this machine relays, and which time scale it keeps up with; the demo asks before it starts.

`python -m penstock.local.relay_rate SECONDS` is one measuring process; as many run side by side as there are cores to use,
so that slow cores, a CPU quota and other work all count.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Final

import uvloop

MEASURE_REAL_S: Final = 1.5
"""Chosen: with the start of the processes about two seconds, during which a user waits."""

_EXIT_REAL_S: Final = 10.0
"""Chosen: a machine on which a process takes longer to start than this is known to be too slow for anything."""

_MAX_PROCESSES: Final = 4
"""Chosen: the demo's busiest processes, router, client and one worker of each role, run side by side."""

_STREAMS: Final = 16
"""Chosen: the requests in flight at the demo's noon."""

_EVENT: Final = (
    b'data: {"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'
)

_EVENTS_PER_S: Final = 150_000 / 9
"""Events/s that the demo takes for each unit of speed. Chosen: at speed 9, 70% of what two cores of an AMD EPYC relay
(105,000 for each second of processor time); on such a machine its lag is 0.14 s where 0.19 s are allowed."""

_MIN_SPEED: Final = 2.0
"""Chosen: the demo's sixteen simulated minutes take eight real ones; longer waits are given up."""


def affordable_speed(most: float, events_per_s: float) -> float:
    """Return the time scale at which the demo can be believed, ``most`` at most; a lower one is in halves, from 2 on.

    Args:
        most: As requested, > 0.
        events_per_s: That the machine relays, per real second, >= 0.
    """
    found = math.floor(2 * events_per_s / _EVENTS_PER_S) / 2
    return min(most, max(_MIN_SPEED, found))


def needed_rate(speed: float) -> float:
    """Return the events per real second that a machine must relay for the demo at a time scale."""
    return speed * _EVENTS_PER_S


async def machine_rate(measure_real_s: float = MEASURE_REAL_S) -> float | None:
    """Return the events that this machine relays per real second over its usable cores; None where it cannot be measured."""
    number = min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
    rates = await asyncio.gather(*(_process_rate(measure_real_s) for _ in range(number)))
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == number else None


async def _process_rate(measure_real_s: float) -> float | None:
    measuring = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "penstock.local.relay_rate",
        str(measure_real_s),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_EXIT_REAL_S):
            said, _ = await measuring.communicate()
        return float(said)
    except (TimeoutError, ValueError):
        return None
    finally:
        if measuring.returncode is None:
            with suppress(ProcessLookupError):
                measuring.kill()
            await measuring.wait()


async def relay_rate(seconds: float) -> float:
    """Return the events per real second that one process sends, relays and receives on sockets of its own."""
    counts = [0] * _STREAMS
    began_s = time.perf_counter()
    end_s = began_s + seconds
    await asyncio.gather(*(_stream(counts, number, end_s) for number in range(_STREAMS)))
    return sum(counts) / (time.perf_counter() - began_s)


async def _stream(counts: list[int], number: int, end_s: float) -> None:
    source, relay_input = await _connected()
    relay_output, sink = await _connected()

    async def relay() -> None:
        while event := await relay_input[0].read(65536):
            relay_output[1].write(event)

    relaying = asyncio.create_task(relay())
    try:
        while time.perf_counter() < end_s:
            source[1].write(_EVENT)
            await sink[0].readexactly(len(_EVENT))
            counts[number] += 1
    finally:
        relaying.cancel()
        for _, writer in (source, relay_input, relay_output, sink):
            writer.close()


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connected() -> tuple[_Stream, _Stream]:
    one, other = socket.socketpair()
    return await asyncio.open_connection(sock=one), await asyncio.open_connection(sock=other)


if __name__ == "__main__":
    sys.stdout.write(str(uvloop.run(relay_rate(float(sys.argv[1])))))
