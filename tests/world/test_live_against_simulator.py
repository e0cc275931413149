"""The simulator and real processes see the same requests and do the same with them; nothing here judges times."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from patience import LIMIT_S

from penstock.engine.core.kv_blocks import prefix_keys
from penstock.router.policy.prefixes import SUB_BLOCK_KEYS, prompt_keys
from penstock.simulator.jobs import Job, PrefixChains
from penstock.simulator.workload import WorkloadSpec, prepare
from penstock.workload.arrivals import OnLong
from penstock.workload.prompts import PromptMaker

SCRIPT = Path(__file__).parents[2] / "bench" / "live_proof.py"
LONGEST = 6000
BLOCK = 16


def shared(first, second):
    """Return how many keys two chains have in common from their beginning."""
    count = 0
    for mine, theirs in zip(first, second, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def test_texts_share_what_the_traces_ids_share():
    """Workers see as many common blocks by text as the simulator by ids, and routers as many whole blocks."""
    spec = WorkloadSpec("mooncake", max_input_tokens=LONGEST, on_long=OnLong.TRUNCATE, limit=200)
    requests = sorted(prepare(spec, seed=0).requests, key=lambda each: each.block_ids)
    prompts, chains = PromptMaker(0), PrefixChains(0)
    jobs = [Job(index, each, chains.chain(each)) for index, each in enumerate(requests)]
    texts = [prompts.make(each) for each in requests]
    found = 0
    for (one, other), (text, another) in zip(pairwise(jobs), pairwise(texts), strict=True):
        by_ids = shared(chains.block_keys(one, BLOCK), chains.block_keys(other, BLOCK))
        assert shared(prefix_keys(text, BLOCK), prefix_keys(another, BLOCK)) == by_ids
        by_text = shared(prompt_keys(text), prompt_keys(another)) - SUB_BLOCK_KEYS + 1
        assert max(0, by_text) == shared(one.chain, other.chain)
        found += by_ids
    assert found > 1000


def test_a_light_load_takes_the_same_way_through_both():
    """Lengths, cached tokens, prefill worker and the order of first tokens agree for every request."""
    options = {"--rows": 24, "--rate": 0.5, "--spread": "even", "--max-input-tokens": LONGEST, "--speed": 4}
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, str(SCRIPT), "--policy", "preble", "--instances", "2P1D", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    (live,) = found["live"]
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        assert [each[name] for each in live] == [each[name] for each in found["simulated"]], name
    assert places(live) == places(found["simulated"])
    assert order(live) == order(found["simulated"])
    assert len({each["worker"] for each in live}) == 2
    assert sum(each["cached_tokens"] for each in live) > 0


def places(rows):
    """Return each request's prefill worker, numbered as they appear: which of two idle ones is first says nothing."""
    seen = {}
    return [seen.setdefault(each["worker"], len(seen)) for each in rows]


def order(rows):
    """Return the requests' places by their first tokens; arrivals are 2 s apart."""
    firsts = [2.0 * index + each["ttft_s"] for index, each in enumerate(rows)]
    return sorted(range(len(rows)), key=firsts.__getitem__)
