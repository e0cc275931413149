"""What a drain and a dead worker cost the router: it reads the streams alone that are about to move, and few at a time."""

import asyncio
from collections import Counter
from functools import partial

import orjson
import pytest
from test_stream_continuation import PATIENT, answer_to, asked, text_of

from penstock.api import Role
from penstock.api.router_workers import RetriesConfig
from penstock.router.core.moves import MAX_CONCURRENT_MOVES, MAX_LOOKUPS
from penstock.router.core.speeds import SpeedCounts
from penstock.router.metrics import RouterMetrics
from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.continuation import ResumableStream
from penstock.router.proxy.moves import StreamMoves
from penstock.router.proxy.query_of_death import QueriesOfDeath
from penstock.router.proxy.stream_continuations import StreamContinuations
from penstock.router.proxy.stream_record import RecordedBytes, StreamRecord

STREAMS, PROMPT, SAID = 256, 2000, 1950
FAST = SpeedCounts(output_tokens=100_000, decode_s=2_000.0)
"""20 ms a token."""


class Record:
    """Stands for what the moves ask of the router."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class Drain:
    """A worker that drains with many streams, another one, and a prefill worker that has 1,000 tokens/s."""

    def __init__(self, *, limit, cached=0):
        self.now_s, self.left, self.lookups, self.reads = 0.0, 0, 0, 0
        prefill = Record(name="p0", spec=Record(role=Role.PREFILL, draining=False), drained=False)
        prefill.speed = SpeedCounts(prompt_tokens=100_000, prefill_s=100.0)
        draining = Record(name="d0", spec=Record(role=Role.DECODE, draining=True), drained=False, speed=FAST)
        other = Record(name="d1", spec=Record(role=Role.DECODE, draining=False), drained=False, speed=FAST)
        workers = {"d0": draining, "d1": other}
        pool = Record(
            get=workers.get, routable=lambda role, _: [prefill] if role is Role.PREFILL else [draining, other]
        )
        queue = Record(workers=Record(eligible={"p0": Record(uncached=self._uncached)}))
        core = Record(
            pool=pool, entry=Role.PREFILL, stages=Record(full=lambda *_: None), queues={Role.PREFILL: queue}
        )
        context = Record(
            admission=Record(core=core),
            clock=Record(now_s=lambda: self.now_s),
            prompt_costs=Record(bytes_per_token=4.0),
            settings=Record(config=Record(drain=Record(migrate_after_seconds=10))),
        )
        self._cached = cached
        rests = StreamContinuations(RetriesConfig(), None, RouterMetrics(), QueriesOfDeath(lambda: 0.0))
        self.moves = StreamMoves(context, rests)
        total, body = RecordedBytes(), {"model": "m", "prompt": "x", "stream": True, "max_tokens": limit}
        request = parse_completion("/v1/completions", b"application/json", orjson.dumps(body), model="m")
        for _ in range(STREAMS):
            meter = Record(tokens=SAID, assignment=Record(worker=draining))
            self.moves.follow(self._call(request, total), meter, Record(break_off=self._leave))
        self.moves.tick()
        self.now_s = 11.0

    def _uncached(self, arrival):
        self.lookups += 1
        return arrival.tokens - self._cached

    def _call(self, request, total):
        record = StreamRecord(request, total)
        for _ in range(3):
            record.append(b'data: {"id":"x","choices":[{"index":0,"text":" sea"}]}\n\n')
        return Record(
            resumable=ResumableStream(record, request),
            prompt_tokens=PROMPT,
            keyed=Record(),
            machine=Record(may_move=True),
            arrival=lambda *_: Record(tokens=PROMPT),
        )

    def _leave(self, _error):
        self.left += 1


@pytest.fixture(name="reads")
def _reads(monkeypatch):
    """Count the records that are read."""
    read, found = StreamRecord.read, []
    monkeypatch.setattr(StreamRecord, "read", lambda self: (found.append(self), read(self))[1])
    return found


def test_streams_that_stay_are_not_read(reads):
    """Their prompts take 2 s, and the 50 tokens that are left take 1 s, even were all of the prompt cached."""
    drain = Drain(limit=SAID + 50)
    for _ in range(10):
        drain.moves.tick()
    assert (drain.left, len(reads), drain.lookups) == (0, 0, 0)


def test_streams_that_move_are_read_as_many_as_may_move_at_once(reads):
    """The others wait until those have a token at their next worker."""
    drain = Drain(limit=100_000)
    for _ in range(10):
        drain.moves.tick()
    assert (drain.left, len(reads), drain.lookups) == (MAX_CONCURRENT_MOVES, MAX_CONCURRENT_MOVES, 0)


@pytest.mark.parametrize(("cached", "moved"), [(1900, MAX_CONCURRENT_MOVES), (100, 0)])
def test_prompts_are_looked_up_where_what_is_cached_decides_and_few_at_a_time(cached, moved):
    """110 tokens left take 2.2 s: less than 3.95 s for prompt and answer, more than 2.05 s without the cached 1,900."""
    drain = Drain(limit=SAID + 110, cached=cached)
    drain.moves.tick()
    assert drain.left == moved
    assert drain.lookups <= MAX_LOOKUPS
    if not moved:
        for _ in range(STREAMS // MAX_LOOKUPS - 1):
            drain.moves.tick()
        assert drain.lookups == STREAMS


async def test_the_streams_of_a_dead_worker_are_read_one_a_turn_of_the_loop(harness, monkeypatch):
    """Forty break at once; between two of them everything else has its turn."""
    *workers, router = await harness.served("aggregated", "aggregated", config=PATIENT)
    dies, began, turns, turn = asyncio.Event(), [], [], 0

    async def speak(serial, request, responder):
        whole = answer_to(request.path, request.body, serial)
        responder.start(200)
        if dies.is_set():
            responder.write(whole)
            responder.end()
            return
        responder.write(whole[:1500])
        began.append(serial)
        await dies.wait()
        responder.break_off()

    async def count_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    build = StreamContinuations.build
    monkeypatch.setattr(StreamContinuations, "build", lambda *given: (turns.append(turn), build(*given))[1])
    for serial, worker in enumerate(workers):
        worker.otherwise = partial(speak, serial)
    asking = [asyncio.create_task(asked(router, "/v1/completions", user=str(each))) for each in range(40)]
    await router.until(lambda: len(began) == len(asking))
    counting = asyncio.create_task(count_turns())
    dies.set()
    got = await asyncio.gather(*asking)
    counting.cancel()
    assert len({text_of(each) for each in got}) == 1
    assert len(turns) == len(asking)
    # One before and one after the counter may see the same turn.
    assert max(Counter(turns).values()) <= 2
