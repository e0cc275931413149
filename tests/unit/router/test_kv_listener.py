"""Workers' KV events over real ZMQ sockets, what a router asks for again, and the exact keys that they correct."""

import asyncio
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest

from penstock.api import Role, RouterConfig
from penstock.core.errors import ConfigError
from penstock.router import kv_listener
from penstock.router.admission import Admission
from penstock.router.core.build import SPLIT, build_router
from penstock.router.core.worker import WorkerSpec
from penstock.router.kv_listener import KvAddress, KvListener, KvSubscription
from penstock.router.policy.kv_events import KvEvents
from penstock.router.policy.prefixes import Prefix, PrefixIndex, token_keys
from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.prefix import ExactKeys, PromptTokenizer, load_tokenizer, read_prompt

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
pytest.importorskip("zmq.asyncio")

TOKENS = list(range(1000, 1000 + 1024))
HASHES = [bytes([number]) * 32 for number in range(64)]
STORED = ["BlockStored", HASHES, None, TOKENS, 16, None, "GPU", None]


STORED_MAP = {
    "type": "BlockStored",
    "block_hashes": HASHES,
    "parent_block_hash": None,
    "token_ids": TOKENS,
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None] * 64,
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
"""As vLLM 0.26 sent it, in another project's issue: volcano-sh/kthena 1535."""


def frames(number, *events):
    """Return a batch as vLLM publishes it."""
    payload = msgspec.msgpack.encode([1.5, list(events), None])
    return [b"kv-events", number.to_bytes(8, "big"), payload]


class Publisher:
    """A worker's side."""

    def __init__(self):
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def close(self):
        """Stop publishing."""
        self.socket.close(linger=0)


async def until(condition):
    """Wait for a condition."""
    while not condition():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


async def first_batch(events, publisher, *batch):
    """Publish until a batch has come, since a subscription takes a moment; return the next number."""
    number = 0
    while not events.batches:
        publisher.socket.send_multipart(frames(number, *batch))
        number += 1
        await asyncio.sleep(0.01)
    return number


def listener(index, *, port=1, workers=("a",)):
    """Return a listener whose worker "a" has this index."""
    core = build_router(RouterConfig(), SPLIT)
    admission = Admission(core, lambda: 0.0)
    admission.set_workers(
        [WorkerSpec(name, Role.PREFILL, "http://127.0.0.1:1", supervised=True) for name in workers]
    )
    found = KvListener(admission, lambda name: index if name == "a" else None, port=port)
    return admission, found


async def test_what_a_worker_says_it_holds_is_held():
    """Stored blocks count as hits for the same tokens; removed ones no more."""
    index, publisher = PrefixIndex(100), Publisher()
    admission, events = listener(index, port=publisher.port)
    events.start()
    prefix = Prefix(token_keys(TOKENS, engine_block_tokens=16))
    number = await first_batch(events, publisher, ["AllBlocksCleared"], STORED)
    assert index.held(prefix) == 2
    publisher.socket.send_multipart(frames(number, ["BlockRemoved", HASHES[32:], "GPU"]))
    batches = events.batches
    await until(lambda: events.batches > batches)

    assert index.held(prefix) == 1
    admission.set_workers([])
    await events.close()
    publisher.close()
    assert events.malformed == 0


@pytest.mark.parametrize(
    "message",
    [
        [],
        [b"topic", b"short", b""],
        [b"topic", bytes(8), b"\xc1 no msgpack"],
        [b"topic", bytes(8), b"\x01"],
        frames(0, ["BlockStored"]),
        frames(0, ["BlockStored", [[1]], None, TOKENS, 16]),
        frames(0, ["BlockStored", HASHES, None, TOKENS, 32]),
        frames(0, ["BlockRemoved", None]),
        frames(0, {"type": "map"}),
        frames(0, {"type": ["BlockStored"]}),
        frames(0, {**STORED_MAP, "token_ids": None}),
        frames(0, {**STORED_MAP, "block_size": 32}),
        [b"topic", bytes(8), msgspec.msgpack.encode({"ts": 1.5})],
        frames(0, None),
    ],
)
def test_messages_that_are_none_are_counted(message):
    """Nothing raises, nothing is learnt."""
    index, events = apply_all(message)

    assert (index.count, events.malformed) == (0, 1)


def apply_all(*messages):
    """Return the index and the listener after some messages of one worker."""
    index = PrefixIndex(100)
    _, events = listener(index)
    of_worker = KvEvents(index, engine_block_tokens=16)
    for message in messages:
        events.apply(of_worker, message)
    return index, events


AS_MAP = [b"", bytes(8), msgspec.msgpack.encode({"ts": 1.5, "events": [STORED_MAP], "data_parallel_rank": 0})]
END_REMOVED = {"type": "BlockRemoved", "block_hashes": HASHES[32:], "medium": "GPU", "group_idx": 0}
OTHER = {"token_ids": TOKENS[::-1]}


@pytest.mark.parametrize(
    ("messages", "held", "gaps"),
    [
        ([frames(0, STORED_MAP)], 2, 0),
        ([AS_MAP], 2, 0),
        ([frames(0, STORED_MAP), frames(1, END_REMOVED)], 1, 0),
        ([frames(0, STORED_MAP), frames(1, {"type": "AllBlocksCleared"})], 0, 0),
        ([frames(0, STORED), frames(5, ["BlockStored", [b"x"], None, TOKENS[:16], 16])], 0, 1),
        *(
            ([frames(0, STORED_MAP), frames(1, event)], 2, 0)
            for event in (
                # An offloading connector drops its copy, or takes one; a salted prompt and an adapter's share with nobody.
                {"type": "BlockRemoved", "block_hashes": HASHES, "medium": "CPU"},
                ["BlockRemoved", HASHES, "CPU"],
                {**STORED_MAP, "block_hashes": [b"x"], "token_ids": TOKENS[:16], "medium": "CPU"},
                {**STORED_MAP, **OTHER, "extra_keys": [["salt"], *[None] * 63]},
                ["BlockStored", HASHES, None, TOKENS[::-1], 16, 1, "GPU", "adapter", [["adapter"]] * 64],
            )
        ),
    ],
)
def test_what_messages_leave_in_the_index(messages, held, gaps):
    """Maps, as vLLM sends them since 0.24, mean what arrays meant; what plain prompts cannot hit changes nothing."""
    index, events = apply_all(*messages)

    assert (index.count, events.gaps, events.malformed) == (held, gaps, 0)


@pytest.mark.parametrize(
    ("medium", "copied"),
    [
        ("CPU", {**STORED_MAP, "token_ids": [], "block_size": 0, "medium": "CPU"}),
        ("STORAGE", {**STORED_MAP, "medium": "STORAGE"}),
        ("CPU", ["BlockStored", HASHES, None, TOKENS, 16, None, "CPU"]),
    ],
)
def test_blocks_in_other_memory_are_known_there(medium, copied):
    """As vLLM's offloading tells of them, with their tokens or without; evicted from the GPU they can be loaded."""

    def after_removal_from(place):
        removed = {"type": "BlockRemoved", "block_hashes": HASHES[::-1], "medium": place}
        index, events = apply_all(frames(0, STORED_MAP), frames(1, copied), frames(2, removed))
        return index.count, index.any_memory.count, events.malformed

    assert after_removal_from("GPU") == (0, 2, 0)
    assert after_removal_from(medium) == (2, 2, 0)


async def test_a_workers_own_port_goes_before_the_graphs():
    """Workers of one host publish on a port each; an address may be IPv6."""
    index, publisher = PrefixIndex(100), Publisher()
    admission, events = listener(index, port=1)
    own = publisher.port
    spec = WorkerSpec(
        "a", Role.PREFILL, "http://127.0.0.1:1", supervised=True, kv_events=f"tcp://127.0.0.1:{own}"
    )
    events.start()
    admission.set_workers([spec])
    await first_batch(events, publisher, ["AllBlocksCleared"])
    await events.close()
    publisher.close()


# ---------------------------------------------------------------------- exact keys


def request(**body):
    """Return a parsed request."""
    import orjson

    raw = orjson.dumps({"model": "m", **body})
    return parse_completion("/v1/completions", b"application/json", raw, model="m")


def words(text):
    """A tokenizer of words."""
    return [len(word) for word in text.split()]


def test_with_a_tokenizer_texts_and_ids_share_keys():
    """The same tokens, however they come; and they are counted."""
    text = " ".join(["abc"] * 600)
    exact = ExactKeys(PromptTokenizer(words))
    by_text = read_prompt(request(prompt=text), exact)

    assert by_text.tokens == 600
    assert by_text.chain == read_prompt(request(prompt=[3] * 600), exact).chain
    assert by_text.block_tokens(4.0) == 512
    assert by_text.chain == token_keys(words(text))


def test_chats_are_not_counted_without_their_template():
    """Their keys agree among themselves; the worker's template adds tokens that the router does not know."""
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "a b c"}]}'
    chat = parse_completion("/v1/chat/completions", b"application/json", raw, model="m")

    keyed = read_prompt(chat, ExactKeys(PromptTokenizer(words)))

    assert keyed.tokens is None
    assert len(keyed.chain) == 1


def test_a_tokenizer_file_that_is_none_is_refused(tmp_path):
    """At start, with its path."""
    pytest.importorskip("tokenizers", reason="the extra tokenizer is not installed")
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")

    with pytest.raises(ConfigError, match=r"router\.tokenizer: .*tokenizer\.json"):
        load_tokenizer(str(path))


def test_a_real_tokenizer_is_loaded(tmp_path):
    """A file that the library wrote."""
    tokenizers = pytest.importorskip("tokenizers", reason="the extra tokenizer is not installed")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))

    assert list(load_tokenizer(str(tmp_path / "tokenizer.json")).text("hello big world")) == [1, 0, 2]


@pytest.mark.parametrize("text", ["", "abc", "abcdefgh", "größe\N{SNOWMAN}"])
def test_simulated_workers_tokens_need_no_file(text):
    """Pieces of 4 bytes of UTF-8, the last filled up; packed again they are the text."""
    ids = load_tokenizer("simulated").text(text)

    assert len(ids) == -(-len(text.encode()) // 4)
    assert b"".join(each.to_bytes(4, sys.byteorder) for each in ids).rstrip(b"\0") == text.encode()


END = b"\xff" * 8


def numbered(number):
    """Return a batch's number as it is sent."""
    return number.to_bytes(8, "big")


class Worker:
    """Publishes on one socket and answers on another; each answer is a list of numbers, None stands for the end."""

    def __init__(self, answers, *, topic=(b"kv",)):
        self.context = zmq.asyncio.Context()
        self.publisher = self.context.socket(zmq.PUB)
        self.answerer = self.context.socket(zmq.ROUTER)
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (self.publisher, self.answerer)]
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.answers = list(answers)
        self.topic = topic
        self.asked = []

    async def publish(self, *numbers):
        """Publish batches."""
        for number in numbers:
            await self.publisher.send_multipart((b"kv", numbered(number), b""))

    async def answer(self):
        """Answer as told; to whoever asks once more, nothing."""
        while True:
            asker, empty, first = await self.answerer.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number in self.answers.pop(0) if self.answers else ():
                name = END if number is None else numbered(number)
                await self.answerer.send_multipart((asker, empty, *self.topic, name, b""))


@asynccontextmanager
async def followed(worker, monkeypatch):
    """Follow a worker; give the numbers applied, in their order, and what is known of its cache."""
    monkeypatch.setattr(kv_listener, "FIRST_ANSWER_S", 0.2)
    monkeypatch.setattr(kv_listener, "NEXT_ANSWER_S", 0.2)
    index, applied = PrefixIndex(100), []

    def apply(events, frames):
        number = int.from_bytes(frames[1], "big")
        applied.append((number, events.numbered(number)))

    listener = SimpleNamespace(
        zmq=zmq,
        context=worker.context,
        index_of=lambda name: index,
        begin=lambda index: KvEvents(index, engine_block_tokens=16),
        apply=apply,
        turns=asyncio.Semaphore(1),
        gaps=0,
    )
    subscription = KvSubscription(listener, "a", (KvAddress(worker.events, worker.replay), "1"))
    tasks = [asyncio.create_task(worker.answer()), asyncio.create_task(subscription.follow())]
    try:
        yield applied
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        worker.context.destroy(linger=0)


@pytest.mark.parametrize("topic", [(b"kv",), ()])
async def test_an_answer_with_a_hole_is_asked_for_again_from_there(monkeypatch, topic):
    """The worker's queue was full: what it dropped in the middle and the end of its answer come with the next."""
    worker = Worker([[0, 1, 2, 5, 6], [3, 4], [5, 6, None]], topic=topic)
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: len(worker.asked) == 2)
        # Silence ended the second answer; the next published batch shows what is missing.
        await until(lambda: len(applied) == 5)
        await asyncio.sleep(0.5)
        await worker.publish(7)
        await until(lambda: len(applied) == 8)

    assert worker.asked == [0, 3, 5]
    assert applied == [(number, False) for number in range(8)]


async def test_what_the_buffer_no_longer_holds_is_lost(monkeypatch):
    """Only then is the worker's cache forgotten; what the answer does hold is known."""
    worker = Worker([[0, None], [7, 8, None]])
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: applied)
        await worker.publish(8, 9)
        await until(lambda: len(applied) == 4)

    assert worker.asked == [0, 1]
    assert applied == [(0, False), (7, True), (8, False), (9, False)]


async def test_a_worker_that_does_not_answer_is_followed_as_before(monkeypatch):
    """It has no such socket, or is too busy: a gap is a gap, and new events are applied."""
    worker = Worker([])
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: len(worker.asked) == 1)
        await worker.publish(3, 4, 6)
        await until(lambda: len(applied) == 3)

    assert applied == [(3, False), (4, False), (6, True)]
    assert worker.asked == [0, 5]


@pytest.mark.parametrize(
    ("changed", "value", "answer", "taken"),
    [
        *((f"{__name__}.numbered", lambda _, name=name: name, [0], 0) for name in (b"", b"short", bytes(9))),
        ("penstock.router.kv_listener.MAX_BATCHES", 10, range(100), 10),
        ("penstock.router.kv_listener.MAX_BYTES", -1, [0, 1, None], 0),
    ],
    ids=["no number", "a short number", "a long number", "too many batches", "too many bytes"],
)
async def test_nonsense_ends_an_answer_and_its_bounds_too(monkeypatch, changed, value, answer, taken):
    """What comes behind is not applied."""
    monkeypatch.setattr(changed, value)
    worker = Worker([answer])
    async with followed(worker, monkeypatch) as applied:
        await until(lambda: worker.asked and len(applied) == taken)
        await asyncio.sleep(0.3)

    assert len(applied) == taken
