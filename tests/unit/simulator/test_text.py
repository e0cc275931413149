"""The scoreboard on a terminal of 80 columns."""

import io

from rich.console import Console

from penstock.simulator.output import scoreboard

ROW = {
    "policy": "least-outstanding-tokens",
    "qps": 123.45,
    "rate_rps": 123.45,
    "capacity": 0.987,
    "capacity_min": 0.98,
    "capacity_max": 0.99,
    "ttft_s": {"p50": 12.345, "p90": 123.456, "p99": 1234.5},
    "hit_rate": 0.876,
    "hit_share_of_bound": 0.765,
    "imbalance_cv": 12.34,
    "busiest_share": 0.5,
    "gpu_hours": 12.345,
    "lost": 12345,
    "tiers": {
        "background": {
            "ok": 12345,
            "rejected": 67890,
            "ttft_s": {"p50": 12.345, "p99": 1234.5},
            "e2e_s": {"p50": 12.345, "p99": 2345.6},
            "compliance": 0.654,
            "attainment": 0.543,
        }
    },
}


def test_no_figure_is_cut_at_80_columns():
    """Each figure stands whole in its row; only a policy's name is folded."""
    page = io.StringIO()
    result = {
        "slo_s": 5.0,
        "summary": [ROW, ROW],
        "notes": [],
        "goodput": [],
        "compares_planners": False,
        "by_routers": [],
    }
    Console(width=80, file=page).print(scoreboard(result))
    text = page.getvalue()
    assert "…" not in text
    row = next(line for line in text.splitlines() if "123.45" in line)
    for word in ("123.45", "98.7%", "87.6%", "76.5%", "12.34", "12345"):
        assert word in row
    tier = next(line for line in text.splitlines() if "background" in line)
    for word in ("12345", "67890", "1234.50 s", "2345.60 s", "65.4%", "54.3%"):
        assert word in tier
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
