"""The prefix index beside a plain one, and its memory."""

import gc
import random
import tracemalloc

import pytest

from penstock.router.policy.prefixes import Prefix, PrefixIndex


class PlainIndex:
    """What the index is to do, as a dict of runs in order of use: head -> keys."""

    def __init__(self, capacity):
        self.capacity, self.runs = capacity, {}

    def walk(self, keys):
        """Return the heads of the runs along a prompt, with how far each agrees with it."""
        place, steps = 0, []
        while place < len(keys) and (run := self.runs.get(keys[place])):
            pairs = list(zip(run, keys[place:], strict=False))
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
            steps.append((keys[place], same))
            place += same
        return steps, place

    def use(self, keys):
        """Remember a prompt; what ran on differently ages by itself, and ancestors are the youngest."""
        steps, place = self.walk(keys)
        at = 0
        for head, same in steps:
            at += same
            rest = self.runs[head][same:]
            if rest and at < len(keys):
                self.runs[head] = self.runs[head][:same]
                self.runs.setdefault(rest[0], rest)
        if place < len(keys):
            self.runs[keys[place]] = keys[place:]
        for head, _ in reversed(steps):
            self.runs[head] = self.runs.pop(head)
        if len(self) > self.capacity:
            excess = len(self) - self.capacity + self.capacity // 32
            for head, run in list(self.runs.items()):
                self.cut(head, max(0, len(run) - max(0, excess)))
                excess -= len(run)
        return place

    def limit(self, keys, blocks):
        """Cut every run along a prompt where it goes beyond ``blocks``."""
        skipped = blocks if blocks < len(keys) and keys[blocks] in self.runs else 0
        steps, _ = self.walk(keys[skipped:])
        at = skipped
        for head, same in steps:
            if at + same > blocks:
                self.cut(head, max(0, blocks - at))
            at += same

    def cut(self, head, blocks):
        """Shorten a run, or drop it."""
        self.runs[head] = self.runs[head][:blocks]
        if not self.runs[head]:
            del self.runs[head]

    def __len__(self):
        return sum(map(len, self.runs.values()))


def prompt(rng, fan_out, longest, shift):
    """Return chained keys of a random prompt; ``shift`` low bits are the same in all of them."""
    texts = [rng.randrange(fan_out) for _ in range(rng.randint(0, longest))]
    return tuple((hash(tuple(texts[: i + 1])) << shift) % 2**64 for i in range(len(texts)))


@pytest.mark.parametrize("shift", [0, 5, 40], ids=["spread", "few parts", "one part"])
@pytest.mark.parametrize(
    ("capacity", "fan_out", "longest"), [(1, 3, 4), (20, 2, 12), (150, 3, 8), (600, 1000, 2), (3000, 40, 3)]
)
def test_flat_arrays_say_what_a_plain_dict_says(capacity, fan_out, longest, shift):
    """Uses, questions, limits and restarts at random: hits and counts agree, however keys fall into the table."""
    rng = random.Random(capacity)
    index, plain = PrefixIndex(capacity), PlainIndex(capacity)
    for step in range(1500):
        keys = prompt(rng, fan_out, longest, shift)
        prefix = Prefix(keys)
        blocks = rng.randint(0, longest)
        if step % 5 == 4:
            index.limit(prefix, blocks)
            plain.limit(keys, blocks)
        elif step % 5 == 3:
            assert index.held(prefix) == plain.walk(keys)[1]
        else:
            assert index.use(prefix) == plain.use(keys)
        if step == 1000:
            index.clear()
            plain.runs.clear()

        assert index.count == len(plain)


@pytest.mark.no_cover  # Coverage's own records would count as the index's memory.
@pytest.mark.parametrize("blocks", [(1,), (2,), (4,), (24,), (1, 2), (1, 4), (24, 1)], ids=str)
def test_a_full_index_takes_at_most_64_bytes_a_block(blocks):
    """All memory told, from prompts of one new block on, and where their length changes once it is full."""
    rng = random.Random(1)
    # Just beyond a power of two, where the table has the most parts a run.
    capacity = 4200
    tracemalloc.start()
    try:
        index = PrefixIndex(capacity)
        for each in blocks:
            for _ in range(2 * capacity // each):
                index.use(Prefix(tuple(rng.getrandbits(64) for _ in range(each))))
        known = index.count
        gc.collect()  # Tuples that the interpreter keeps for reuse are not the index's.
        full, _ = tracemalloc.get_traced_memory()
        # What goes with the index was the index's; other threads and coverage allocate beside it.
        del index
        gc.collect()
        empty, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    used = full - empty
    assert known > 0.9 * capacity
    assert used / known <= 64
