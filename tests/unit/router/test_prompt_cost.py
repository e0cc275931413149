"""What the parts of a prompt cost is learnt from the sums that workers return."""

import random
from collections import defaultdict
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.proxy.prompt_cost import START_BYTES_PER_TOKEN, PromptCosts
from penstock.router.proxy.prompt_parts import PromptPart


def test_text_costs_a_token_for_four_bytes_until_workers_count_otherwise():
    """Rounded up, and never zero; texts of two bytes per token end at two."""
    costs = PromptCosts()
    assert [costs.estimate(size) for size in (0, 1, 4, 5, 4000)] == [1, 1, 1, 2, 1000]
    assert costs.bytes_per_token == START_BYTES_PER_TOKEN

    for _ in range(50):
        costs.learn(2000, (), 1000)

    assert costs.estimate(2000) == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize(("size", "tokens"), [(0, 5), (5, 0), (100, 1), (1, 100), (1000, -1)])
def test_a_count_that_no_prompt_can_have_teaches_nothing(size, tokens):
    """It is a fault of the worker's."""
    costs = PromptCosts()

    costs.learn(size, (), tokens)

    assert costs.bytes_per_token == START_BYTES_PER_TOKEN


TRUTH = {
    "text": 1 / 4.4,
    "wide": 1 / 2.0,
    "calls": 1 / 3.3,
    "tools": 1 / 3.6,
    "message": 5.0,
    "image/17": 144.0,
    "image/22": 3000.0,
    "image/unknown": 1000.0,
    "audio/wav": 25 / 42_667,
    "file": 0.1,
}
"""Tokens of a unit for a model that nobody has seen yet."""


def _tools(number):
    return PromptPart("tools", 30_000 + 7 * number, number)


KINDS = {
    "short text": lambda at: (at.randint(20, 60), [PromptPart("message", 1)]),
    "text": lambda at: (at.randint(500, 8000), [PromptPart("message", 1)]),
    "chinese": lambda at: (
        (size := at.randint(600, 3000)),
        [PromptPart("wide", size), PromptPart("message", 1)],
    ),
    "tools": lambda _: (2000, [PromptPart("message", 1), _tools(1)]),
    "changing tools": lambda at: (2000, [PromptPart("message", 1), _tools(at.randint(100, 10**6))]),
    "calls": lambda at: (
        5000,
        [PromptPart("message", 21), _tools(2), PromptPart("calls", at.randint(5_000, 20_000))],
    ),
    "small image": lambda at: (at.randint(40, 800), [PromptPart("message", 1), PromptPart("image/17", 1)]),
    "large images": lambda at: (
        at.randint(40, 800),
        [PromptPart("message", 1), PromptPart("image/22", at.randint(1, 3))],
    ),
    "linked image": lambda _: (40, [PromptPart("message", 1), PromptPart("image/unknown", 1)]),
    "audio": lambda at: (100, [PromptPart("message", 1), PromptPart("audio/wav", at.randint(10**5, 10**6))]),
    "file": lambda at: (100, [PromptPart("message", 1), PromptPart("file", at.randint(10**4, 10**5))]),
}
"""Kinds of requests as text bytes and parts."""


def _counted(text_bytes, parts, at):
    of_text = sum(part.units for part in parts if part.kind in {"text", "wide"})
    tokens = (text_bytes - of_text) * TRUTH["text"] + sum(part.units * TRUTH[part.kind] for part in parts)
    return max(1, round(tokens * at.uniform(0.95, 1.05)))


def _errors(kinds, seed, *, warm=50, measured=150):
    """Return the factors between estimates and counts, at least 1, by kind, after ``warm`` requests of a mix of kinds."""
    at, costs, found = random.Random(seed), PromptCosts(), defaultdict(list)
    for number in range(warm + measured):
        kind = at.choice(kinds)
        text_bytes, parts = KINDS[kind](at)
        tokens = _counted(text_bytes, parts, at)
        if number >= warm:
            estimate = costs.estimate(text_bytes, parts)
            found[kind].append(max(estimate / tokens, tokens / estimate))
        costs.learn(text_bytes, parts, tokens)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mix", [[each] for each in KINDS] + [list(KINDS)], ids=[*KINDS, "all of them"])
def test_after_fifty_requests_estimates_are_within_a_factor(mix, seed):
    """1.2 for text, tools and their calls, 1.5 where images, audio or files are in it: alone, and all kinds in turn."""
    for kind, factors in _errors(mix, seed).items():
        typical = sorted(factors)[len(factors) * 9 // 10]
        assert typical <= (1.5 if {"image", "images", "audio", "file"} & set(kind.split()) else 1.2), kind


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("other", ["linked image", "large images", "calls", "changing tools", "audio"])
def test_text_keeps_its_own_cost_beside_what_is_not_text(other, seed):
    """A hundred requests with images or tools, from the first request on, and then texts."""
    at, costs = random.Random(seed), PromptCosts()
    for _ in range(100):
        text_bytes, parts = KINDS[other](at)
        costs.learn(text_bytes, parts, _counted(text_bytes, parts, at))

    assert 1 / 1.3 < costs.bytes_per_token * TRUTH["text"] < 1.3

    for _ in range(5):
        costs.learn(8000, (), round(8000 * TRUTH["text"]))
    assert costs.estimate(8000) == pytest.approx(8000 * TRUTH["text"], rel=0.05)


PARTS = st.lists(
    st.builds(
        PromptPart,
        st.sampled_from(sorted(TRUTH)),
        st.integers(0, 10**6),
        st.none() | st.integers(0, 3),
    ),
    max_size=5,
)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), PARTS, st.integers(-5, 10**7)), max_size=20),
    st.integers(0, 10**6),
    PARTS,
)
def test_whatever_workers_count_an_estimate_is_a_number(history, text_bytes, parts):
    """At least one token, and never less for more of the same."""
    costs = PromptCosts()
    for each in history:
        costs.learn(*each)

    estimate = costs.estimate(text_bytes, parts)

    assert 1 <= estimate < inf
    assert costs.estimate(text_bytes + 100, parts) >= estimate
