"""What is asked of a Prometheus, and what is said where it cannot answer."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from prometheus_api_client.exceptions import PrometheusApiClientException
from requests import ConnectionError as NoConnection
from requests import JSONDecodeError, Timeout

from penstock.assess.history import PrometheusHistory
from penstock.assess.reading import Subject, read_history
from penstock.core.errors import ConfigError, ObservationError
from penstock.core.metric_names import VLLM_REQUEST_PROMPT_TOKENS, VLLM_RUNNING, VLLM_TTFT

END_S = 1_700_000_040.0
NAMES = [
    *(f"{each}_{part}" for each in (VLLM_REQUEST_PROMPT_TOKENS, "vllm:request_generation_tokens", VLLM_TTFT) for part in ("bucket", "sum", "count")),
    VLLM_RUNNING,
]  # fmt: skip


class Server:
    """Answers as Prometheus does for two replicas with ten requests a minute; each name's values may be changed.

    ``gap`` are the seconds, counted back from the end, of which it has no samples.
    """

    url = "http://user:secret@prometheus.example:9090"

    def __init__(self, names=NAMES, *, replicas=2.0, gap=(0.0, 0.0), error=None, extra=0):
        self.names, self.replicas, self.gap, self.error, self.extra = names, replicas, gap, error, extra
        self.asked = []

    def get_label_values(self, label, params):
        """Return names, models or instances."""
        self._fail()
        match = " ".join(params["match[]"])
        if label == "__name__":
            return (
                list(self.names) if 'model_name="llama"' in match and "tgi_" not in match.split()[0] else []
            )
        return {"instance": ["10.0.0.1:8000"], "model_name": ["llama", "qwen"] if self.names else []}.get(
            label, []
        )

    def custom_query(self, query, params):
        """Return no cache configuration."""
        self._fail()
        return []

    def custom_query_range(self, query, start_time, end_time, step):
        """Return a value of each step outside the gap."""
        self._fail()
        self.asked.append(query)
        times = np.arange(start_time.timestamp(), end_time.timestamp() + 1, float(step))
        times = [at for at in times if not self.gap[1] <= END_S - at < self.gap[0]]
        if "count_over_time" in query:
            return [self._line({}, 40.0, times)]
        if "count(" in query:
            return [self._line({}, self.replicas, times)]
        if "_bucket" in query:
            made = [self._line({"le": le}, value, times) for le, value in (("100", 4.0), ("+Inf", 10.0))]
            return made + [
                self._line({"le": "100", "x": str(place)}, 1.0, times) for place in range(self.extra)
            ]
        return [self._line({}, 2000.0 if "_sum" in query else 0.0, times)]

    def _line(self, labels, value, times):
        return {"metric": labels, "values": [[at, str(value)] for at in times]}

    def _fail(self):
        if self.error is not None:
            raise self.error


def read(server, *, model="llama", since_s=3600.0):
    """Read the server's history of a model."""
    return read_history(
        PrometheusHistory(server), Subject(model, ('namespace="prod"',)), end_s=END_S, since_s=since_s
    )


def test_everything_is_asked_in_parts_of_a_day_at_most():
    """A week takes less than 200 queries, each with the model's and the given matchers."""
    server, queries = Server(), []
    history = PrometheusHistory(server, on_query=queries.append)
    found = read_history(history, Subject("llama", ('namespace="prod"',)), end_s=END_S, since_s=7 * 86_400.0)
    assert found.requests == pytest.approx(7 * 1440 * 10)
    assert found.replica_hours == pytest.approx(7 * 24 * 2)
    assert history.queries < 200
    assert queries == list(range(1, history.queries + 1))
    assert all(re.search(r'\{model_name="llama",namespace="prod"', query) for query in server.asked)


def test_two_scrapes_of_one_page_count_once():
    """The larger of the series of one target and engine counts; then targets are added."""
    server = Server()
    read(server)
    assert any(
        query.startswith("sum by (le) (max by (instance,engine,le) (increase(") for query in server.asked
    )


def test_a_missing_day_is_named_and_no_idle_one():
    """Its requests are unknown, and the note says for how long."""
    found = read(Server(gap=(30 * 3600.0, 6 * 3600.0)), since_s=48 * 3600.0)
    assert int(np.isnan(found.arrivals).sum()) == 24 * 60
    assert "24.0 of 48.0 hours have no samples, the longest gap 24.0 h" in " ".join(found.notes)
    assert found.requests == pytest.approx(24 * 60 * 10)


def test_what_is_not_exported_is_named_with_what_follows():
    """Here there are no gaps between tokens and no prefix-cache hits."""
    found = read(Server())
    assert found.gaps is None
    assert found.hit_rate is None
    assert any(note.startswith("no time between tokens") for note in found.notes)
    assert any(note.startswith("no prefix-cache hits") for note in found.notes)


REAL = [line for line in Path(__file__).with_name("vllm-0.32.txt").read_text().splitlines() if line[0] != "#"]
_CACHE = ("prefix_cache", "kv_cache_usage", "cache_config")


@pytest.mark.parametrize("has_cache", [True, False])
def test_the_names_of_a_real_vllm_are_known(has_cache):
    """Load, latencies and cache are read of what vLLM 0.32 exports; without its cache's metrics the rest is."""
    known = [name for name in REAL if has_cache or not any(part in name for part in _CACHE)]
    server = Server(known)
    found = read(server)
    assert found.runtime == "vllm"
    assert found.ttft is not None
    assert found.gaps is not None
    assert found.waiting is not None
    assert found.running is not None
    assert (found.hit_rate is not None) is has_cache
    assert any("vllm:inter_token_latency_seconds_bucket" in query for query in server.asked)
    assert any(note.startswith("no prefix-cache hits") for note in found.notes) is not has_cache


def test_an_unknown_model_is_refused_with_the_known_ones():
    """And with the one that is meant."""
    with pytest.raises(ConfigError, match=r"--model lama: .* it has llama, qwen; did you mean llama\?"):
        read(Server(), model="lama")


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (Server(()), r"no series of vLLM, SGLang, .*; check that the engines are scraped"),
        (Server([VLLM_RUNNING]), r"llama \(vllm\) has no vllm:request_prompt_tokens, .*or give --trace"),
        (Server(error=JSONDecodeError("Expecting value", "<html>", 0)), r"prometheus\.example:9090 does not answer as Prometheus does"),
        (Server(error=NoConnection()), r"nothing answers at prometheus\.example:9090; start it, or correct --prometheus"),
        (Server(error=Timeout()), r"prometheus\.example:9090 did not answer in time"),
        (Server(error=PrometheusApiClientException("HTTP Status Code 422")), r"refuses the query: HTTP Status Code 422"),
        (Server(replicas=10_000.0), r"10,000 processes serve llama at a time, more than 1,000; choose one fleet with --match"),
        (Server(extra=600), r"has 602 series, more than 500; choose fewer with --match"),
        (Server(gap=(math.inf, -1.0)), r"no sample of the prompt tokens of llama in this time"),
    ],
    ids=["nothing", "no histograms", "a login page", "unreachable", "slow", "refused", "10,000 processes", "series", "idle"],
)  # fmt: skip
def test_each_bad_server_is_one_clear_sentence(server, said):
    """None shows the password that the URL holds."""
    with pytest.raises((ConfigError, ObservationError), match=said) as refused:
        read(server)
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_hpa_of_the_deployment_is_read_from_kube_state_metrics():
    """With two queries; without a Deployment there are none, and a Deployment without an HPA is noted."""

    class WithHpa(Server):
        def custom_query(self, query, params):
            self.asked.append(query)
            if "_info" in query:
                return [{"metric": {"horizontalpodautoscaler": "web"}, "value": [0, "1"]}]
            if "_spec_" in query:
                name = "kube_horizontalpodautoscaler_spec"
                target = {"__name__": f"{name}_target_metric", "metric_name": "vllm_num_requests_waiting"}
                bound = {"__name__": f"{name}_max_replicas"}
                return [{"metric": target, "value": [0, "5"]}, {"metric": bound, "value": [0, "8"]}]
            return []

    def read_of(server, deployment):
        subject = Subject("llama", ('namespace="prod"',), deployment)
        return read_history(PrometheusHistory(server), subject, end_s=END_S, since_s=3600.0)

    server = WithHpa()
    found = read_of(server, "llama").autoscaler
    assert (found.name, found.words) == ("web", "5 waiting, 1 to 8 replicas")
    asked = [query for query in server.asked if "horizontalpodautoscaler" in query]
    assert all('namespace="prod"' in query for query in asked)
    assert [len(asked), 'scaletargetref_name="llama"' in asked[0], 'autoscaler="web"' in asked[1]] == [
        2,
        True,
        True,
    ]
    assert read_of(WithHpa(), None).autoscaler is None
    assert any("knows no HPA of llama" in note for note in read_of(Server(), "llama").notes)
