from __future__ import annotations

import re
from dataclasses import replace

import orjson
import pytest
from click.testing import CliRunner

from penstock.api import Role
from penstock.cli.planner import planner
from penstock.core.errors import ConfigError
from penstock_planner import decision_input
from penstock_planner.decide.config import Mode
from penstock_planner.decide.demand.observation import Demand
from penstock_planner.decide.pipeline import decide
from penstock_planner.explain import in_words, select, since_last_change, span_of
from penstock_planner.ledger import LedgerFile, read_ledger
from penstock_planner.replay import replay, settings, what_if


def _no_profile(named):
    raise ConfigError(f"no profile is called {named}")


@pytest.fixture(name="folder")
async def _folder(world):
    """A ledger of six decisions: up, three of grace, down, hold."""
    world.load.kv = lambda now, _workers: 0.95 if now <= 1030 else 0.1
    await world.run_until(200)
    return world.folder


def _rewrite(folder, change):
    path = folder / "ledger.jsonl"
    records = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for record in records:
        change(record)
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))


def _invoke(*arguments, **keys):
    return CliRunner().invoke(planner, [str(a) for a in arguments], **keys)


def test_replay_makes_every_decision_again_bit_for_bit(folder):
    """Decisions, states and the chain between them."""
    result = replay(read_ledger(folder))
    assert (result.decisions, result.differences) == (6, ())
    answer = _invoke("replay", folder / "ledger.jsonl")
    assert (answer.exit_code, answer.stdout) == (0, "6 decisions recomputed, 0 differences\n")
    plain = orjson.loads(_invoke("replay", folder, "--json").stdout)
    assert plain == {"decisions": 6, "differences": [], "notes": []}


def test_replay_says_how_far_it_is(folder):
    """At every record, with and without --set: a long ledger takes minutes."""
    ledger, of_replay, of_what_if = read_ledger(folder), [], []
    replay(ledger, of_replay.append)
    what_if(ledger, {}, of_what_if.append)
    assert of_replay == of_what_if == [number + 1 for number in range(len(ledger.records))]


def test_replay_shows_a_changed_number_and_fails(folder):
    """One reading altered afterwards: that decision no longer follows from it."""

    def change(record):
        if record["type"] == "decision" and record["decision"]["id"] == "d000001":
            record["window"]["pulls"][0]["kv"]["total"] = 0.5

    _rewrite(folder, change)
    answer = _invoke("replay", folder)
    assert answer.exit_code == 1
    assert "d000001: decision differs" in answer.stdout
    assert "6 decisions recomputed, 1 differences" in answer.stdout


def test_a_ledger_whose_version_worded_its_sentences_otherwise_replays(folder):
    """What was decided, its reasons and its numbers are the same."""

    def change(record):
        for role in record.get("decision", {}).get("roles", ()):
            role["sentence"] = role["sentence"].replace("prefill", "Prefill")

    _rewrite(folder, change)
    assert replay(read_ledger(folder)).differences == ()


@pytest.mark.parametrize(("outcome", "differs"), [("{}: said otherwise", False), ("other", True)])
def test_an_outcome_may_be_explained_otherwise_and_not_be_another(folder, outcome, differs):
    """What follows a step's first colon or semicolon is an explanation; the word before it was decided."""

    def change(record):
        for role in record.get("decision", {}).get("roles", ()):
            for step in role["steps"]:
                step["outcome"] = outcome.format(step["outcome"])

    _rewrite(folder, change)
    assert bool(replay(read_ledger(folder)).differences) is differs


def test_replay_notices_a_broken_chain_of_states(folder):
    """A decision whose state before is not what the last one left, which the ledger only counts."""

    def change(record):
        if record["type"] == "decision" and record["decision"]["id"] == "d000005":
            record["before"]["roles"]["decode"]["backoff"] = 1
            record["state"]["roles"]["decode"]["backoff"] = 0

    _rewrite(folder, change)
    differences = replay(read_ledger(folder)).differences
    assert [(d.id, d.what) for d in differences] == [("d000005", "chain")]


def test_what_if_prints_only_what_would_differ(folder):
    """With a down-threshold of 0.05 the scale-down would not have happened."""
    total, different = what_if(read_ledger(folder), settings(["decode-kv-scale-down-threshold=0.05"]))
    assert total == 6
    assert [record["decision"]["id"] for record, _ in different] == [f"d00000{n}" for n in (2, 3, 4, 5, 6)]
    answer = _invoke("replay", folder, "--set", "decode-kv-scale-up-threshold=0.99")
    assert answer.exit_code == 0
    assert "was: decode 1 -> 2: KV 0.95 > 0.90" in answer.stdout
    assert "now: decode 1: KV 0.95 is between 0.50 and 0.99" in answer.stdout
    assert answer.stdout.endswith("1 of 6 decisions would differ\n")
    rows = orjson.loads(_invoke("replay", folder, "--json", "--set", "max-gpu-budget=2").stdout)
    roles = {r["role"]: r["reason"] for r in rows["different"][0]["what_if"]["roles"]}
    assert (rows["decisions"], roles["decode"]) == (6, "gpu_budget")


@pytest.mark.parametrize("pair", ["max-gpu-budget", "colour=blue", "decode-kv-scale-up-threshold=7"])
def test_a_wrong_what_if_is_refused(pair):
    """With the key that was wrong."""
    with pytest.raises(ConfigError, match=f"--set {pair}"):
        settings([pair])


def test_explain_tells_the_last_decisions_rule_by_rule(folder):
    """Sentence, reason, steps with their numbers, and what became of it."""
    text = _invoke("explain", "--log-dir", folder, "--id", "d000001").stdout
    assert "d000001  adjustment at 30 s (2023-11-14 22:30:30 UTC), 30 pulls, GPUs 2 -> 3 (budget 8)" in text
    assert "decode 1 -> 2: KV 0.95 > 0.90  [thresholds: above_threshold]" in text
    assert "thresholds   mean=0.95 down=0.5 up=0.9 against 0.9 => above_threshold" in text
    assert "decode to 2: applied" in text
    assert "demand unknown: no router reported it" in text
    (record,) = orjson.loads(_invoke("explain", "--log-dir", folder, "--id", "d000001", "--json").stdout)
    assert [a["outcome"] for a in record["actuations"]] == ["applied"]
    assert _invoke("explain", "--log-dir", folder, "--all", "--last", "3").stdout.count("adjustment at") == 3


def _decision(number, roles, desired):
    """One decision of a pool that had one replica, ten seconds after the one before."""
    decision = {
        "id": f"d{number:06d}",
        "max_gpu_budget": None,
        "gpus": 1,
        "gpus_after": desired,
        "no_operation": False,
        "roles": [{**role, "current": 1, "desired": desired} for role in roles],
    }
    times = {"at_s": 100.0 + 10 * number, "origin_s": 100.0}
    return {"type": "decision", "kind": "adjustment", "decision": decision, "config": {}, **times}


def test_explain_shows_changes_and_says_in_one_line_what_has_held_since():
    """A planner that decides every few seconds holds most of the time; --all shows that too."""
    roles = [{"role": "decode", "sentence": "decode 2: within", "reason": "within", "steps": []}]
    ledger = LedgerFile(tuple(_decision(n, roles, 2 if n == 2 else 1) for n in range(1, 7)), (), ())
    shown = select(ledger, last=5, decision_id=None, with_unchanged=False)
    assert [record["decision"]["id"] for record in shown] == ["d000002"]
    assert len(select(ledger, last=5, decision_id=None)) == 5
    held = "4 decisions since then changed nothing; the newest at 60 s: decode 2: within"
    assert since_last_change(ledger) == held


NEWEST_S = 1767580200.0
"""2026-01-05 02:30:00 UTC."""


def _night():
    """A decision every ten minutes until 02:30, the one at 02:10 a change."""
    roles = [{"role": "decode", "sentence": "decode 2: within", "reason": "within", "steps": []}]
    records = [_decision(n, roles, 2 if n == 4 else 1) for n in range(7)]
    return LedgerFile(
        tuple({**each, "wall_s": NEWEST_S - 600.0 * (6 - n)} for n, each in enumerate(records)), (), ()
    )


@pytest.mark.parametrize(
    ("since", "until", "found"),
    [
        ("02:10", None, [4, 5, 6]),
        ("02:10", "02:20", [4, 5]),
        (None, "01:40:30", [0, 1]),
        ("2026-01-05 02:20", None, [5, 6]),
        ("2026-01-05T03:20+01:00", None, [5, 6]),
        ("02:31", None, [0, 1, 2, 3, 4, 5, 6]),
        ("02:21", "02:29", []),
    ],
)
def test_explain_shows_the_decisions_of_a_span_of_the_wall_clock(since, until, found):
    """A time without a date is the newest one before the ledger's end: 02:31 was yesterday."""
    ledger = _night()
    shown = select(ledger, last=None, decision_id=None, span=span_of(ledger, since, until))
    assert [int(each["decision"]["id"][1:]) for each in shown] == found


def test_explain_shows_the_changes_of_a_span_alone_if_asked():
    """Those of an empty span are none: not the newest decision instead."""
    ledger = _night()
    for since, found in (("02:00", ["d000004"]), ("02:20", [])):
        span = span_of(ledger, since, None)
        shown = select(ledger, last=None, decision_id=None, with_unchanged=False, span=span)
        assert [each["decision"]["id"] for each in shown] == found
    assert "(2026-01-05 02:10:00 UTC)" in in_words(ledger.records[4])


@pytest.mark.parametrize(
    ("since", "until", "message"),
    [
        ("half past two", None, "--since half past two: write a time such as 02:00"),
        ("25:00", None, "--since 25:00: write a time"),
        ("2026-01-05 02:20", "2026-01-05 02:00", "--until 2026-01-05 02:00: is before --since"),
    ],
)
def test_a_wrong_span_is_refused(since, until, message):
    """With the option, the value and what to write."""
    with pytest.raises(ConfigError, match=message):
        span_of(_night(), since, until)


def test_explain_says_how_many_gpus_are_left_once_a_worker_has_drained(folder):
    """A draining worker holds its GPU for now."""
    records = select(read_ledger(folder), last=None, decision_id=None)
    (shrunk,) = (each for each in records if any(r["action"] == "down" for r in each["decision"]["roles"]))
    assert shrunk["decision"]["gpus_after"] == shrunk["decision"]["gpus"] == 3
    assert "GPUs 3, 2 once drained (budget 8)" in in_words(shrunk)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2.594e-101, "~0"),
        (0.0, "0"),
        (26979.4, "26,979"),
        (0.0704, "0.0704"),
        (-4e-9, "~0"),
        (None, "unknown"),
    ],
)
def test_explain_writes_numbers_without_exponents(value, shown):
    """A decayed mean is as good as zero, and a large number is grouped."""
    step = {"name": "late", "inputs": {"x": value, "y": {"z": value}}, "threshold": None, "outcome": "pass"}
    roles = [{"role": "decode", "sentence": "s", "reason": "r", "steps": [step]}]
    assert f"x={shown} y={{z: {shown}}} => pass" in in_words(_decision(1, roles, 1))


async def test_explain_tells_demand_forecast_and_supply(world, new_world):
    """What came, was rejected and waits, how long replicas have been starting; in mode adaptive what is expected."""
    world.config = replace(world.config, mode=Mode.HPA, adjustment_interval_s=15.0)
    world.backend.start_s = 40.0
    world.load.kv = lambda _now, _workers: 0.95
    world.load.demand = lambda now: Demand(
        period_s=1.0, arrivals=2, uncached_tokens=1500, refused=1, waiting=3, oldest_wait_s=now - 1000
    )
    await world.run_until(30)
    text = _invoke("explain", "--log-dir", world.folder, "--all").stdout
    assert (
        "demand 2 requests/s, 1,500 uncached tokens/s; 15 rejected; 3 waiting, the oldest for 30.0 s" in text
    )
    assert "supply prefill 1 ready, 1 starting for 15 s; decode 1 ready, 1 starting for 15 s" in text
    adaptive = new_world()
    adaptive.config = replace(adaptive.config, mode=Mode.ADAPTIVE)
    adaptive.load.demand = lambda _now: Demand(
        period_s=1.0,
        arrivals=2,
        uncached_tokens=1500,
        prefilled_tokens=1500,
        prefilling_workers=1,
        in_flight={Role.PREFILL: 2},
    )
    await adaptive.run_until(60)
    text = _invoke("explain", "--log-dir", adaptive.folder, "--all").stdout
    assert re.search(r"forecast 1,5\d\d uncached tokens/s in \d+ s; 2 workers can compute 3,000", text), text


def test_explain_sends_a_terminal_no_sequence_of_the_ledgers(folder):
    """A foreign ledger's control characters are shown as escapes, and a line break makes no line of its own."""

    def forge(record):
        if record["type"] == "decision":
            record["decision"]["roles"][0]["sentence"] = "kept\x1b[2J\nd000099  all is well"

    _rewrite(folder, forge)
    printed = _invoke("explain", "--log-dir", str(folder)).output
    assert "\x1b" not in printed
    assert r"kept\x1b[2J\nd000099  all is well" in printed


# ---------------------------------------------------------------- decide FILE


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ((), ["decode 2 -> 3: KV 0.93 > 0.90  [thresholds: above_threshold]"]),
        (
            ("--mode", "sla"),
            [
                "prefill 2 -> 3: demand forecast for 31 s ahead: 18,000 tokens/s, more than 16,302 (82% of the 19,883 that 2",
                "needed       replicas=3 replicas_now=2",
            ],
        ),
    ],
)
def test_the_examples_can_be_decided_as_they_are(more, told):
    """What --example prints is a valid FILE; that of mode sla has its profile in it."""
    answer = _invoke("decide", "-", input=_invoke("decide", "--example", *more).stdout)
    assert answer.exit_code == 0
    assert all(line in answer.stdout for line in told)


@pytest.fixture(name="sla_folder")
async def _sla_folder(world):
    """A ledger of mode sla, its profile in the header."""
    text = _invoke("decide", "--example", "--mode", "sla").stdout
    *_, config = decision_input.parse(text, name="x", read=_no_profile)
    world.config = replace(world.config, mode=Mode.SLA, ttft_slo_s=1.0, performance=config.performance)

    def demand(now):
        rate = 9 if now < 1030 else 30
        tokens = 1000 * rate
        return Demand(
            1.0, arrivals=rate, prompt_tokens=tokens, uncached_tokens=tokens, prefilled_tokens=tokens
        )

    world.load.demand = demand
    await world.run_until(60)
    return world.folder


def test_a_record_of_mode_sla_is_explained_with_its_profile_and_decided_again(sla_folder, tmp_path):
    """What `explain --json` prints is a FILE: the same decision and state come out."""
    file = tmp_path / "record.json"
    file.write_text(_invoke("explain", "--log-dir", sla_folder, "--json").stdout)
    (record,) = orjson.loads(file.read_bytes())
    answer = _invoke("decide", file, "--json")
    assert answer.exit_code == 0, answer.output
    assert orjson.loads(answer.stdout) == {"decision": record["decision"], "state": record["state"]}
    result = replay(read_ledger(sla_folder))
    assert (result.decisions > 10, result.differences) == (True, ())


def test_memories_of_an_older_version_have_other_keys_and_replay_all_the_same(sla_folder):
    """What came since has its default, what is gone is left out, in the states before and after a decision alike."""

    def change(record):
        for state in (record.get("state"), record.get("before")):
            if state is not None and state["learned"]:
                del state["learned"]["adaptive"]["quiet_since_s"]
        if record.get("before", {}).get("learned"):
            # Decisions that are only counted are made again without the key.
            record["before"]["learned"]["sla"]["forecast"] = None

    _rewrite(sla_folder, change)
    result = replay(read_ledger(sla_folder))
    assert (result.decisions > 10, result.differences) == (True, ())


def test_bad_numbers_in_a_file_are_unknown_and_hold():
    """null, .nan and 1.7 are not KV usage."""
    text = """
observations:
  - {at_s: 1, pools: {prefill: {ready: 1}, decode: {ready: 3}}, kv: {a: null, b: .nan, c: 1.7}, queue: -1}
"""
    decision, _ = decide(*decision_input.parse(text, name="x", read=_no_profile))
    assert {r.reason.value for r in decision.roles} == {"metric_unknown"}


def _one_pull(fields):
    return f"observations: [{{at_s: 1, {fields}}}]"


_SEEN = "at_s: 1, pools: {prefill: {ready: 1}, decode: {ready: 1}}"

# What is in the file, and what its refusal says; a whole number is a count of replicas.
REFUSED = {
    "[1": "neither YAML nor JSON",
    "7": "expected a map",
    "{}": "KeyError: 'observations'",
    "observations: []\nobservation: []": "unknown key 'observation'",
    "observations: []\nconfig: {colour: 1}": "config.colour: extra inputs",
    "observations: []\nconfig: {mode: sla}": "mode sla needs a performance profile: give it as",
    "observations: []\nconfig: {mode: sla}\nperformance: {}": "performance: .*prefill: Field required",
    "observations: []\nperformance: {}": "has no effect in mode load",
    "observations: []\nconfig: {mode: sla, profile: gone}": "no profile is called gone",
    _one_pull("pools: {queen: {ready: 1}}"): "'queen' is not a valid Role",
    _one_pull("pools: {decode: {redy: 1}}"): "unexpected keyword argument 'redy'",
    _one_pull("pools: {decode: {ready: 1}}, kv: {a: b}"): "could not convert",
    _one_pull("pools: {decode: {ready: 1}}, demand: {period_s: 1, arrivals: -2}"): (
        "demand.arrivals -2 must be a number, 0 or more"
    ),
    _one_pull("pools: {decode: {ready: 1}}, demand: {period_s: 0}"): "demand.period_s 0 must be above 0",
    _one_pull("pools: {decode: {ready: -1}}"): "pools.decode.ready -1 must be a whole",
    _one_pull("pools: {decode: {ready: 1.5}}"): "pools.decode.ready 1.5 must be a whole",
    _one_pull("pools: {decode: {ready: true}}"): "pools.decode.ready True must be a whole",
    _one_pull("pools: {decode: {ready: 1}, router: {ready: 1}}"): "pools decode, router",
    _one_pull("pools: {decode: {ready: 1}, aggregated: {ready: 1}}"): "pools aggregated",
    "observations: [{at_s: .nan, pools: {decode: {ready: 1}}}]": "at_s nan must be a number above 0",
    f"observations: [{{{_SEEN}}}, {{{_SEEN}}}]": "at_s 1 must be a number above 1",
    f"start_s: .inf\nobservations: [{{{_SEEN}}}]": "at_s 1 must be a number above inf",
    f"end_s: 0.5\nobservations: [{{{_SEEN}}}]": "end_s 0.5 must hold every observation",
    f"config: {{decode-kv-scale-down-threshold: 0.95}}\nobservations: [{{{_SEEN}}}]": (
        "config.decode-kv-scale-down-threshold: 0.95 is not below"
    ),
    f"config: {{max-gpu-budget: 1}}\nobservations: [{{{_SEEN}}}]": (
        "config.max-gpu-budget: 1 is below the floor of 1 for decode"
    ),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_a_file_that_no_running_planner_could_have_seen_is_refused(text, message):
    """One message that names what is wrong."""
    with pytest.raises(ConfigError, match=message):
        decision_input.parse(text, name="x.yaml", read=_no_profile)
