"""The simple server: constants, its queue and its cache."""

from penstock.simulator.jobs import Job, PrefixChains
from penstock.simulator.scenario import SimpleModel
from penstock.simulator.servers import SimpleServer


def job_of(request, index=0, chains=None):
    """Make a job with its keys."""
    return Job(index, request, (chains or PrefixChains(0)).chain(request))


def test_a_cached_prefix_is_not_computed_again(request_at):
    """The second prompt shares one of two blocks; a repeated one still computes its last token."""
    server, chains = SimpleServer(SimpleModel("t", 0.001, 10_000)), PrefixChains(0)
    first = job_of(request_at(0.0, 1024, ids=(1, 2)), 0, chains)
    second = job_of(request_at(0.0, 1024, ids=(1, 3)), 1, chains)
    third = job_of(request_at(0.0, 1024, ids=(1, 2)), 2, chains)
    for job in (first, second, third):
        server.add(job, 0.0)

    ends = []
    while (due_s := server.next_s()) is not None:
        if server.run(due_s):
            ends.append(due_s)

    assert [job.cached_tokens for job in (first, second, third)] == [0, 512, 1023]
    assert [round(end_s, 6) for end_s in ends] == [1.024, 1.536, 1.537]


def test_engine_keys_follow_the_text_of_partial_blocks(request_at):
    """600 tokens are 37 full blocks of 16; a prompt that goes on shares exactly those it has in common."""
    chains = PrefixChains(0)
    short = job_of(request_at(0.0, 600, ids=(1, 2)), 0, chains)
    long = job_of(request_at(0.0, 1024, ids=(1, 2)), 1, chains)
    other = job_of(request_at(0.0, 1024, ids=(1, 3)), 2, chains)

    keys = chains.block_keys(short, 16)

    assert len(keys) == 37
    assert chains.block_keys(long, 16)[:37] == keys
    assert len(set(keys) & set(chains.block_keys(other, 16))) == 32
