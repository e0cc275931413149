"""What a router says of its last minute."""

import pytest

from penstock.router.metrics import RouterMetrics
from penstock.router.ui.history import History


def test_only_the_last_minute_counts():
    """Ten minutes without trouble do not hide an overload of half a minute; it is over a minute after it ended."""
    metrics = RouterMetrics()
    history = History(metrics, None, lambda: {"gpus": None}, 5.0)
    history.tick(0.0)
    assert history.traffic(0.0)["ttft_p50_s"] is None
    for second in range(1, 721):
        is_overloaded = 600 < second <= 630
        metrics.arrivals += 4
        metrics.refused += is_overloaded
        metrics.queue_timeouts += is_overloaded
        metrics.ttft.observe(20.0 if is_overloaded else 0.5, 2)
        history.tick(float(second))
        if second == 630:
            shown = history.traffic(630.0)
            assert (shown["period_s"], shown["arrivals"], shown["rejected"]) == (60.0, 240, 60)
            assert shown["ttft_p99_s"] == pytest.approx(20.0, rel=0.1)
    quiet = history.traffic(720.0)
    assert (quiet["arrivals"], quiet["rejected"], quiet["ttft_slo_s"]) == (240, 0, 5.0)
    assert quiet["ttft_p99_s"] == pytest.approx(0.5, rel=0.1)
