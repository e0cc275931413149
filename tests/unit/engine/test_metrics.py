"""The /metrics page, read back by Prometheus' own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.clock import LagTracker
from penstock.engine.core.request_slots import RequestSlots
from penstock.engine.serve.metrics import EngineMetrics
from penstock.engine.serve.settings import ServeFlags, resolve


@pytest.fixture
def worker(make_timeline):
    """A small engine with its metrics."""

    class Small:
        timeline = make_timeline(role="decode", blocks=10)
        lag = LagTracker()
        metrics = EngineMetrics(
            resolve(ServeFlags('na"me\\', "h200-llama-3.1-8b-tp1", max_model_len=100)),
            timeline,
            lag,
            RequestSlots(None, 2),
            now_s=lambda: 0.0,
        )

        def run(self, until_s=float("inf")):
            while (due_s := self.timeline.next_due_s()) is not None and due_s <= until_s:
                for outcome in self.timeline.run_until(due_s, max_steps=1):
                    self.metrics.observe_step(outcome)
                    for state in outcome.finished:
                        self.metrics.observe_finished(state)

        def read(self):
            families = text_string_to_metric_families(self.metrics.render().decode())
            return {
                (
                    sample.name,
                    *(
                        value
                        for key, value in sorted(sample.labels.items())
                        if key in {"reason", "le", "finished_reason"}
                    ),
                ): sample
                for family in families
                for sample in family.samples
            }

    return Small()


def test_values_of_a_small_run(worker, request_of):
    """One fetched and one local request: times, tokens and reasons in the right places."""
    worker.timeline.submit(request_of("a", prompt=8, outputs=3, load_remote=True))
    worker.timeline.submit(request_of("b", prompt=8, outputs=1, arrival_s=0.1))
    worker.timeline.submit(request_of("c", prompt=28, outputs=1, arrival_s=0.1))
    worker.run(until_s=0.2)
    page = worker.read()
    assert page["vllm:num_requests_waiting_by_reason", "deferred"].value == 1
    assert page["vllm:num_requests_waiting_by_reason", "capacity"].value == 1
    assert page["vllm:num_requests_waiting",].value == 2
    assert page["vllm:num_requests_running",].value == 1
    assert page["vllm:kv_cache_usage_perc",].value == 0.4
    worker.run()
    page = worker.read()
    assert page["vllm:request_success_total", "length"].value == 3
    assert page["vllm:generation_tokens_total",].value == 5
    assert page["vllm:prompt_tokens_total",].value == 44
    assert page["vllm:prompt_tokens_cached_total",].value == 8
    assert page["vllm:time_to_first_token_seconds_count",].value == 3
    assert page["vllm:inter_token_latency_seconds_count",].value == 2
    assert page["vllm:request_time_per_output_token_seconds_count",].value == 1
    assert page["vllm:e2e_request_latency_seconds_count",].value == 3
    assert page["vllm:request_prompt_tokens_sum",].value == 44
    assert page["vllm:request_generation_tokens_bucket", "1.0"].value == 2
    assert page["vllm:kv_cache_usage_perc",].value == 0


def test_lag_is_exported_once_there_are_samples(worker):
    """No sample, no quantile: unknown is not zero."""
    assert ("penstock_schedule_lag_p99_seconds",) not in worker.read()
    worker.lag.record(0.25)
    page = worker.read()
    assert page["penstock_schedule_lag_p99_seconds",].value == 0.25
    assert page["penstock_schedule_lag_samples_total",].value == 1
