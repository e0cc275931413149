"""Requests that no prefill worker helps go to decode alone; each reason is a row of docs/router.md."""

from pathlib import Path

import orjson
import pytest

from penstock.router.proxy.completion import parse_completion
from penstock.router.proxy.decode_only import REASONS, decode_only_reason

ROOT = Path(__file__).parents[3]
COMPLETION = {"prompt": "The quick brown fox"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LOGLIKELIHOOD = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
"""As evaluation harnesses ask for a text's likelihood."""


def asked(path, fields):
    """Return a request as the router has it."""
    raw = orjson.dumps({"model": "llama", **fields})
    return parse_completion(f"/v1/{path}", b"application/json", raw, model="llama")


CASES = [
    ("`/v1/responses`", [("responses", {"input": "hi"})]),
    (
        "`n` or `best_of` above 1, several prompts",
        [
            ("completions", COMPLETION | {"n": 2}),
            ("completions", COMPLETION | {"best_of": 3}),
            ("completions", {"prompt": ["a", "b"]}),
            ("chat/completions", CHAT | {"n": 2}),
        ],
    ),
    (
        "`prompt_logprobs`",
        [
            ("chat/completions", CHAT | {"prompt_logprobs": 1}),
            ("completions", COMPLETION | {"prompt_logprobs": 0}),
        ],
    ),
    (
        "`echo` with `logprobs`",
        [("completions", COMPLETION | LOGLIKELIHOOD | {"logprobs": each}) for each in (0, 1)],
    ),
    ("`use_beam_search`", [("completions", COMPLETION | {"use_beam_search": True})]),
]


@pytest.mark.parametrize(("what", "requests"), CASES, ids=[what for what, _ in CASES])
def test_a_request_that_prefill_cannot_help_says_why(what, requests):
    """Each way to ask for it is found."""
    assert {decode_only_reason(asked(*each)).what for each in requests} == {what}


def test_every_reason_has_a_case_and_a_row_of_the_docs():
    """In the order of the table."""
    page = (ROOT / "docs/router.md").read_text(encoding="utf-8")

    assert [what for what, _ in CASES] == [each.what for each in REASONS]
    assert "\n".join(f"| {each.what} | {each.why} |" for each in REASONS) in page


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", COMPLETION),
        ("completions", COMPLETION | {"n": 1, "best_of": 1, "logprobs": 5}),
        ("completions", COMPLETION | {"echo": True}),
        ("completions", COMPLETION | {"echo": False, "logprobs": 1, "use_beam_search": False}),
        ("completions", COMPLETION | {"prompt_logprobs": None}),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "echo": True}),
        ("messages", CHAT | {"max_tokens": 8}),
    ],
)
def test_other_requests_are_prefilled(path, fields):
    """Log probabilities of the answer alone, or an echo without them, come from decode as they are."""
    assert decode_only_reason(asked(path, fields)) is None
