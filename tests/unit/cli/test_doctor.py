from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from penstock.cli.doctor import doctor
from penstock.cli.doctor_install import disk_findings, limit_findings, program_findings, state_findings
from penstock.cli.doctor_local import (
    Gpu,
    gpu_findings,
    graph_findings,
    parse_gpus,
    warnings_of_logs,
)
from penstock.core.errors import ConfigError
from penstock.core.kv_transfers import KvTransferCounts
from penstock.local.probes import RouterQueue, Traffic
from penstock.local.status import LocalGraphStatus, PlannerView, ProcessStatus
from penstock_operator.doctor.findings import Severity


def process(name, role, state="ready", **changes):
    """One process that runs."""
    healthy = ProcessStatus(
        name=name,
        role=role,
        state=state,
        gpus=(0,) if role != "router" else (),
        pid=1,
        url="http://127.0.0.1:8001",
        restarts=0,
        inflight_requests=0,
        inflight_tokens=0,
        kv_usage_fraction=0.1,
        reason=None,
    )
    return replace(healthy, **changes)


def graph(**changes):
    """A graph that is well."""
    healthy = LocalGraphStatus(
        namespace="llama",
        model="llama",
        speed=1.0,
        running=True,
        stopping=False,
        router_url="http://127.0.0.1:8000",
        log_dir="/logs",
        planner_log_dir="/logs/planner",
        processes=(process("llama_frontend", "router"), process("llama_worker", "aggregated")),
        pools=(),
        queue=RouterQueue(requests=0, tokens=0, oldest_s=0.0),
        traffic=Traffic(60.0, 60, 0, 0.4, 2.1, 5.0),
        kv_transfers=None,
        gpus_used=1,
        gpu_budget=8,
        planner=PlannerView(phase="observing", next_decision_s=3.0, lag_p99_s=0.001),
        lag_p99_s={"router": 0.001},
        decisions=(),
    )
    return replace(healthy, **changes)


WARNING, PROBLEM = Severity.WARNING, Severity.PROBLEM


def with_worker(state="ready", **changes):
    """A graph of one worker that differs."""
    return {"processes": (process("llama_worker", "aggregated", state, **changes),)}


GPUS = (Gpu(0, "NVIDIA H100 80GB HBM3", 81559, 60000), Gpu(1, "NVIDIA H100 80GB HBM3", 81559, 4))


def findings(*, absent=None, open_files=1_048_576, is_writable=True, gpus=GPUS, graphs=None):
    """All findings of a machine that is well, except for the changes."""
    folder = Path("/state")
    graphs = {"llama": graph()} if graphs is None else graphs
    machine = [*program_findings(absent or {}), *state_findings(folder, is_writable=is_writable)]
    machine += limit_findings(open_files)
    return [*machine, *gpu_findings(gpus, graphs), *graph_findings(graphs, folder)]


def bad(**changes):
    """Severity, subject and message of what is not ok."""
    return [
        (each.severity, each.subject, each.message)
        for each in findings(**changes)
        if each.severity is not Severity.OK
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpus": None, "graphs": {}},
        {"open_files": 4096},
        {"open_files": -1},
        {"graphs": {"llama": graph(kv_transfers=KvTransferCounts(done=9, none=10))}},
        {"graphs": {"llama": graph(kv_transfers=KvTransferCounts(done=10, none=5, lost=5))}},
        {"graphs": {"llama": graph(planner=None, planner_log_dir=None)}},
        *(
            {"graphs": {"llama": graph(**with_worker(each))}}
            for each in ("starting", "requested", "draining")
        ),
    ],
)
def test_a_machine_that_is_well(changes):
    """The bound of open files is enough and -1 is not a limit; processes on their way are not a fault, nor is a planner."""
    assert bad(**changes) == []


@pytest.mark.parametrize(
    ("changes", "severity", "subject", "message"),
    [
        (
            {"absent": {"tensorboard": ["tensorboard", "setuptools"], "plots": []}},
            Severity.UNKNOWN,
            "programs",
            "tensorboard, setuptools are not installed; needed for viewing the planner's dashboard",
        ),
        ({"is_writable": False}, PROBLEM, "state", "/state is not writable"),
        (
            {"open_files": 1024},
            WARNING,
            "open files",
            "a process may open 1024 files; a busy router needs 4096",
        ),
        ({"gpus": "driver not loaded"}, PROBLEM, "GPUs", "nvidia-smi: driver not loaded"),
        (
            {"gpus": (Gpu(3, "L40S", 46068, 2000),)},
            WARNING,
            "GPUs",
            "GPU 3 does not belong to a graph, but 2000 of its 46068 MiB are in use",
        ),
        (
            {"graphs": {"llama": graph(kv_transfers=KvTransferCounts(done=9, none=11))}},
            PROBLEM,
            "graph llama",
            (
                "of 20 prompts 11 were computed twice, because their KV did not come from prefill to decode "
                "(9 done, 11 none, 0 lost)"
            ),
        ),
        ({"graphs": {"llama": "statefile: torn"}}, PROBLEM, "graph llama", "statefile: torn"),
    ],
)
def test_the_machine(changes, severity, subject, message):
    """Each fault alone gives one finding."""
    assert bad(**changes) == [(severity, subject, message)]


LATE = "in the last 60 s: 240 requests (4.00/s), 120 rejected, TTFT p50 7.25 s p99 31.00 s"


@pytest.mark.parametrize(
    ("changes", "severity", "message"),
    [
        (
            {"running": False, "queue": None},
            PROBLEM,
            "its arbiter is gone, so nothing is restarted or scaled",
        ),
        ({"stopping": True}, WARNING, "it is being stopped"),
        ({"queue": None}, PROBLEM, "its router does not answer at http://127.0.0.1:8000"),
        (with_worker("failed", reason="exit 1"), PROBLEM, "llama_worker failed: exit 1"),
        (with_worker("unhealthy", reason="timed out"), PROBLEM, "llama_worker: timed out"),
        (with_worker(restarts=2), WARNING, "llama_worker was restarted 2 times"),
        (with_worker(restarts=1), WARNING, "llama_worker was restarted once"),
        (
            with_worker(slow="ITL 100 ms against 20 ms"),
            WARNING,
            "llama_worker is slow: ITL 100 ms against 20 ms",
        ),
        (
            {"full_disks": ("the disk of /logs is full: 0 bytes are free",)},
            PROBLEM,
            "the disk of /logs is full: 0 bytes are free; nothing new is decided, recorded or logged",
        ),
        (
            {
                "planner": PlannerView(
                    "observing", 3.0, None, problems=("prometheus: nothing answers at 127.0.0.1:9",)
                )
            },
            PROBLEM,
            "prometheus: nothing answers at 127.0.0.1:9",
        ),
        (
            {"planner": PlannerView("observing", 3.0, None, problems=("old",), silent_real_s=312.4)},
            PROBLEM,
            "the planner last wrote 312 s ago (real): it hangs or is gone",
        ),
        ({"gpus_used": 9}, PROBLEM, "9 GPUs are held, which exceeds the budget of 8"),
        (
            {
                "traffic": Traffic(60.0, 240, 120, 7.25, 31.0, 5.0),
                "queue": RouterQueue(requests=79, tokens=9, oldest_s=31.0),
            },
            PROBLEM,
            f"it is overloaded: {LATE}; the TTFT SLO is 5 s; 79 requests are waiting, the oldest for 31.0 s",
        ),
        (
            {"traffic": Traffic(60.0, 240, 1, None, None, 5.0)},
            WARNING,
            "in the last 60 s: 240 requests (4.00/s), 1 rejected; the TTFT SLO is 5 s",
        ),
        (
            {"traffic": Traffic(60.0, 60, 0, 5.5, 9.0, 5.0)},
            WARNING,
            "in the last 60 s: 60 requests (1.00/s), 0 rejected, TTFT p50 5.50 s p99 9.00 s; the TTFT SLO is 5 s",
        ),
        ({"planner": None}, WARNING, "its planner has not written its state"),
        (
            {"planner": PlannerView("target_unavailable", None, None)},
            WARNING,
            "its planner cannot read the statefile, so it makes no decisions and the replicas stay as they are",
        ),
        (
            {"lag_p99_s": {"router": 0.25}},
            WARNING,
            "router lags by 0.25 s or more in 1 of 100 ticks; the machine is too busy for this load",
        ),
    ],
)
def test_a_graph(changes, severity, message):
    """Each fault alone gives one finding."""
    assert bad(gpus=None, graphs={"llama": graph(**changes)}) == [(severity, "graph llama", message)]


def test_a_failed_worker_comes_with_its_own_log_and_what_brings_it_back():
    """Not the logs of its siblings, and not a restart that nothing does."""
    broken = graph(**with_worker("failed", reason="exit 1"))
    found = next(each for each in findings(graphs={"llama": broken}) if each.remedy)
    assert found.remedy == (
        "tail /logs/llama_worker.log; fix the cause, then penstock down --namespace llama and penstock up FILE: "
        "it is not restarted automatically"
    )


def test_what_nvidia_smi_prints():
    """Index, name, memory in MiB; other words are refused."""
    text = "0, NVIDIA H100 80GB HBM3, 81559, 4\n1, NVIDIA H100 80GB HBM3, 81559, 70000\n\n"
    assert parse_gpus(text) == (
        Gpu(0, "NVIDIA H100 80GB HBM3", 81559, 4),
        Gpu(1, "NVIDIA H100 80GB HBM3", 81559, 70000),
    )
    assert parse_gpus("") == ()
    for wrong in ("No devices were found", "0, name, [N/A], 4"):
        with pytest.raises(ValueError, match=r"unpack|invalid literal"):
            parse_gpus(wrong)


def test_what_a_log_repeats_is_a_finding(tmp_path):
    """An error said for minutes makes the machine unhealthy; a graph that does not run has no such log."""
    at = datetime.now() - timedelta(seconds=200)  # noqa: DTZ005 - as the logs have it
    lines = [
        f"{at + timedelta(seconds=60 * each):%Y-%m-%d %H:%M:%S},000 ERROR   p: decision not recorded, so not applied id='{each}'\n"
        for each in range(4)
    ]
    (tmp_path / "llama_worker.log").write_text("".join(lines))
    running = graph(log_dir=str(tmp_path))
    (found,) = warnings_of_logs({"llama": running, "other": "gone", "ended": replace(running, running=False)})
    assert (found.severity, found.subject) == (PROBLEM, "graph llama")
    assert (
        found.message == "llama_worker logged 4 times in 180 s: decision not recorded, so not applied id='3'"
    )
    assert found.remedy == f"tail {tmp_path}/llama_worker.log"


@pytest.mark.parametrize(
    ("blocks", "inodes", "said"),
    [
        (0, 10, [(PROBLEM, "is full: 0 bytes are free")]),
        (1 << 20, 0, [(PROBLEM, "is full: it has no inode left")]),
        (10 << 10, 10, [(WARNING, "40 MiB are free")]),
        (1 << 20, 10, []),
    ],
)
def test_a_disk_without_room(tmp_path, monkeypatch, blocks, inodes, said):
    """Full, without inodes, nearly full, and with room."""
    disk = SimpleNamespace(
        f_bavail=blocks, f_bfree=blocks, f_frsize=4096, f_favail=inodes, f_files=1000, f_blocks=1 << 30
    )
    monkeypatch.setattr("os.statvfs", lambda _folder: disk)
    found = list(disk_findings(tmp_path))
    assert [each.severity for each in found] == [severity for severity, _ in said]
    assert all(message in each.message for each, (_, message) in zip(found, said, strict=True))


def test_local_json(tmp_path, monkeypatch):
    """The verdict and every finding with its four keys; a state folder that can be made is not a fault."""
    folder = tmp_path / "new" / "state"
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(folder))
    done = CliRunner().invoke(doctor, ["--local", "--json", "--namespace", "nowhere"])
    report = json.loads(done.output)
    assert report["healthy"] is False
    assert done.exit_code == 1
    assert all(set(each) == {"severity", "subject", "message", "remedy"} for each in report["findings"])
    said = {each["message"] for each in report["findings"]}
    assert f"{folder} is writable" in said
    assert "namespace 'nowhere': not running; start it with `penstock up FILE`" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--namespace", "a", "--all-namespaces"],
        ["--local", "--all-namespaces"],
        ["--local", "--graph", "llama"],
        ["--local", "--context", "c"],
    ],
)
def test_flags_that_exclude_each_other(arguments):
    """They are refused before anything is looked at."""
    done = CliRunner().invoke(doctor, arguments)
    assert isinstance(done.exception, ConfigError)
