"""Performance profiles that cannot be planned by: each problem with its key, value and bound."""

import copy
import json

import pytest

from penstock.core.errors import ConfigError
from penstock.performance.profile import read_profile

PLAIN = {
    "prefill": {"prompt_tokens": [100, 1000], "ttft_s": [0.01, 0.1]},
    "decode": {
        "contexts": [500, 1000],
        "kv_usage": [0.5, 1.0],
        "itl_s": [[0.01, 0.02], [0.01, 0.02]],
        "tokens_per_s": [[100, 150], [50, 75]],
        "kv_tokens": 100_000,
    },
}


def changed(path, value):
    """Return the profile's text with one value replaced, or removed where it is None."""
    plain = copy.deepcopy(PLAIN)
    *way, last = path
    at = plain
    for key in way:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return json.dumps(plain)


def test_a_whole_profile_is_read():
    """And nothing is wrong with it."""
    profile = read_profile(json.dumps(PLAIN), origin="p.json")
    assert (profile.prefill.prompt_tokens, profile.decode.kv_tokens) == ((100, 1000), 100_000)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("prefill",), None, "prefill: Field required"),
        (("decode", "contexts"), 3, "not a performance profile"),
        (("prefill", "prompt_tokens"), [100], "prefill.prompt_tokens: 1 points, at least 2 are needed"),
        (("prefill", "prompt_tokens"), [100, 100], "100 follows 100, yet points must increase"),
        (("prefill", "prompt_tokens"), [0, 100], "prefill.prompt_tokens[0]: 0 must be a number above 0"),
        (("prefill", "ttft_s"), [0.1], "prefill.ttft_s: 1 values for 2 points"),
        (("prefill", "ttft_s"), [0.1, float("nan")], "prefill.ttft_s[1]: nan must be a number above 0"),
        (("decode", "kv_usage"), [0.5, 1.5], "decode.kv_usage: 1.5 exceeds 1"),
        (("decode", "itl_s"), [[0.01, 0.02]], "decode.itl_s: 1 rows for 2 contexts"),
        (("decode", "tokens_per_s", 1), [50], "decode.tokens_per_s[1]: 1 values for 2 points"),
        (("decode", "kv_tokens"), 0, "decode.kv_tokens: 0 must be a number above 0"),
        (("prefill_gpus",), -1, "prefill_gpus: -1 must be 0 or more"),
    ],
)
def test_what_keeps_a_profile_from_use_is_named(path, value, words):
    """With the file, and with the command that makes a sound one."""
    with pytest.raises(ConfigError) as caught:
        read_profile(changed(path, value), origin="p.json")
    message = str(caught.value)
    assert message.startswith("p.json: ")
    assert words in message
    assert "penstock profile" in message


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_no_json_is_refused(text):
    """Not a traceback, however deep."""
    with pytest.raises(ConfigError, match=r"p\.json: not JSON"):
        read_profile(text, origin="p.json")
