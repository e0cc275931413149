"""What a change of the lease rolls: the services that read it, and no other."""

import pytest

LEASE = {"durationSeconds": 40, "decoderBlocksTtlSeconds": 300}


def templates(objects, **changes):
    """Return the pod templates of a graph by Deployment."""
    return {
        name: each["spec"]["template"]
        for (kind, name), each in objects(**changes).items()
        if kind == "Deployment"
    }


@pytest.mark.parametrize(
    ("changes", "rolled"),
    [
        ({"lease": {**LEASE, "durationSeconds": 50}}, {"llama-prefill", "llama-decode", "llama-frontend"}),
        ({"lease": {**LEASE, "decoderBlocksTtlSeconds": 301}}, {"llama-decode"}),
        ({"services": {"prefill": {"lease": {"durationSeconds": 60}}}}, {"llama-prefill", "llama-frontend"}),
        ({"services": {"decode": {"lease": {"durationSeconds": 60}}}}, {"llama-decode"}),
        ({"lease": {**LEASE, "acknowledgeShortLease": True}}, set()),
    ],
)
def test_a_change_rolls_only_what_reads_it(objects, changes, rolled):
    """Routers judge hand-overs by prefill's lease; the life of decoder blocks is decode's alone."""
    before, after = templates(objects, lease=LEASE), templates(objects, **{"lease": LEASE, **changes})
    assert {name for name in before if before[name] != after[name]} == rolled
