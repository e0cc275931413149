"""The worker's JSON of preemption by tier."""

import json

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.core.transfer import LinkTerms
from penstock.engine.serve.settings import ServeFlags, resolve


def flags(config=None, **changes):
    """Return flags of a 70B worker on eight GPUs with 1,000 blocks."""
    given = {"model": "m", "profile": "a100-llama-70b-bf16-tp8", "num_gpu_blocks_override": 1000}
    given["scheduling_policy"] = "priority"
    return ServeFlags(**{**given, "preemption_config": config and json.dumps(config), **changes})


def test_host_memory_becomes_blocks_and_links_add_up():
    """16 tokens of 327,680 B are 5.24 MB a block; eight GPUs copy at once."""
    terms = resolve(flags({"swapGigabytes": 64, "maxPerRequest": 2})).engine.preemption
    assert (terms.max_per_request, terms.reserved_fraction, terms.host_blocks) == (2, 0.3, 12207)
    assert terms.host_link == LinkTerms(0.001, 200e9)


def test_without_it_the_worker_is_vllms():
    """The priority policy alone preempts as vLLM does, and the whole cache is everybody's."""
    settings = resolve(flags())
    assert settings.engine.preemption is None
    assert settings.max_model_len == 16_000


def test_the_longest_request_fits_beside_the_reserve():
    """A request of a lower tier must never wait for what it may not have; premium's may be longer."""
    settings = resolve(flags({"premiumReservedFraction": 0.25}))
    assert [settings.longest_tokens(priority) for priority in (-1, 0, 1, 2)] == [16000, 16000, 12000, 12000]
    bounded = resolve(flags({"premiumReservedFraction": 0.25}, max_model_len=8000))
    assert bounded.longest_tokens(2) == 8000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"maxPerRequest": -1}, "maxPerRequest: Input should be greater than or equal to 0"),
        ({"maxPerRequest": True}, "maxPerRequest: Input should be a valid integer"),
        ({"premiumReservedFraction": 1}, "premiumReservedFraction: Input should be less than 1"),
        ({"dropAboveSeconds": 0}, "dropAboveSeconds: Input should be greater than 0"),
        ({"swapGigabyte": 1}, "swapGigabyte: Extra inputs are not permitted"),
    ],
)
def test_bad_values_are_named(config, message):
    """With their key and bound."""
    with pytest.raises(ConfigError, match=message):
        resolve(flags(config))


def test_preemption_needs_the_priority_policy():
    """An option without effect is refused."""
    with pytest.raises(ConfigError, match="needs --scheduling-policy priority, which is fcfs"):
        resolve(flags({"maxPerRequest": 1}, scheduling_policy="fcfs"))
