"""The shipped profiles say what the tables say; wrong files are refused with a reason."""

import json
from dataclasses import asdict

import pytest

from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.engine.profiles.performance import EngineSpeed, performance_of, planning_profile
from penstock.engine.profiles.schema import parse


@pytest.mark.parametrize("name", profiles.names())
def test_file_name_sources_and_capacity(name):
    """Each profile is named like its file, names its sources, and holds at least one long sequence."""
    profile = profiles.load(name)
    assert profile.name == name
    assert profile.prefill.source
    assert profile.decode.source
    assert profile.kv_capacity_tokens > 131_072
    assert ("derived" in profile.kv.source) == (profile.kv.measured_tokens is None)


def test_sums_of_kernel_times_get_an_overhead_and_a_factor():
    """15 ms on the TTFT and 8% on the step of a profile that was fitted to kernel times; docs/engine.md has the forms."""
    latency = profiles.load("a100-llama-8b-bf16-tp1").latency()
    ttft_s, step_s = latency.prefill.ttft_s(4096), latency.decode.step_s(64, 128_000)
    assert ttft_s * 1000 == pytest.approx(15 + 6.1 + 0.0504 * 4096 + 1.69e-6 * 4096**2)
    assert step_s * 1000 == pytest.approx(1.08 * (10.9 + 64 * 0.0245 + 128_000 * 7.88e-5))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("h200-llama-3.1-8b-tp1", 945_029),
        ("h100-llama-3.3-70b-tp2", 224_133),
        # (4 · (85.52e9 · 0.9 - 3.92e9) - 72.65e9) / 327,680
        ("h100-llama-3.3-70b-tp4", 669_989),
        ("h100-llama-3.3-70b-tp8", 1_561_688),
    ],
)
def test_kv_capacity(name, tokens):
    """Measured where it was measured, derived from memory elsewhere."""
    assert profiles.load(name).kv_capacity_tokens == tokens


@pytest.mark.parametrize(
    ("name", "tokens", "ttft_ms"),
    [
        ("h200-llama-3.1-8b-tp1-table", 100, 19.525),
        ("h200-llama-3.1-8b-tp1-table", 8236, 171.029),
        ("h100-llama-3.3-70b-tp2-table", 16380, 1957.1),
        # The outlier at 6,205 is not used: a straight line between its neighbours.
        ("h100-llama-3.3-70b-tp8-table", 6205, (162.322 + 320.965) / 2),
    ],
)
def test_measured_ttft(name, tokens, ttft_ms):
    """Measured points come out as measured."""
    assert profiles.load(name).latency().prefill.ttft_s(tokens) * 1000 == pytest.approx(ttft_ms, abs=0.05)


@pytest.mark.parametrize(
    ("name", "context", "batch", "step_ms"),
    [
        ("h200-llama-3.1-8b-tp1-table", 350, 263, 19.111),
        ("h200-llama-3.1-8b-tp1-table", 5644, 53, 15.117),
        ("h100-llama-3.3-70b-tp4-table", 32992, 3, 21.35),
        # Past 1,049 the measurements fall, so the fit's slope continues from there.
        ("h200-llama-3.1-8b-tp1-table", 350, 1311, 46.648 + 262 * (0.0222 + 350 * 3.16e-5)),
    ],
)
def test_measured_decode_step(name, context, batch, step_ms):
    """Measured points come out as measured, excluded ones do not."""
    decode = profiles.load(name).latency().decode
    assert decode.step_s(batch, batch * context) * 1000 == pytest.approx(step_ms, abs=0.01)


def test_unknown_profile_lists_the_known_ones():
    """A typing error is answered with the choices."""
    with pytest.raises(ConfigError, match=r"h200-llama-3\.1-8b-tp1, .*path of a \.yaml file"):
        profiles.load("h300")


OWN = (
    "{name: mine, gpu: G, model: M, precision: P, tensor_parallel: 1, kv: {bytes_per_token: 10, source: me, KV},"
    " prefill: {kind: quadratic, overhead_ms: 1, per_token_ms: 1, per_token2_ms: 0, source: me},"
    " decode: {kind: linear, base_ms: 1, per_sequence_ms: 0, per_kv_token_ms: 0, source: me}}"
)
NO_ROOM = "{gpu_memory_bytes: 10, gpu_memory_utilization: 0.9, weight_bytes: 100, reserve_bytes_per_gpu: 0}"


def test_own_profile_by_path(tmp_path):
    """A user's file is read like a shipped one."""
    path = tmp_path / "mine.yaml"
    path.write_text(OWN.replace("KV", "measured_tokens: 1000"))
    assert profiles.load(str(path)).kv_capacity_tokens == 1000
    with pytest.raises(ConfigError, match="cannot read it"):
        profiles.load(str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not YAML"),
        ("name: x", "gpu: Field required"),
        ("{}", "tensor_parallel: Field required"),
        ("kv: {bytes_per_token: 1, source: s}", "exactly one of measured_tokens and derived"),
        ("colour: red", "colour: Extra inputs are not permitted"),
        (OWN.replace("KV", f"derived: {NO_ROOM}"), "leave no memory"),
    ],
)
def test_broken_profiles_are_refused(text, message):
    """Every problem is named with its key."""
    with pytest.raises(ConfigError, match=message):
        parse(text, origin="test")


@pytest.fixture
def profile_file(tmp_path):
    """Return a function that writes a profile of one GPU per role, changed, and returns its path."""
    engine = EngineSpeed("h200-llama-3.1-8b-tp1")

    def write(**changes):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({**asdict(performance_of(engine, engine)), **changes}))
        return str(path)

    return write


@pytest.mark.parametrize("model", ["meta/llama", "llama", ""])
def test_a_profile_of_the_graphs_engines_is_taken(build, profile_file, model):
    """The publisher may be left out; a profile that does not say its model is taken at its word."""
    assert planning_profile(build().spec, profile_file(model=model)).prefill_gpus == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "meta/opt"}, "model: measured of meta/opt, but the graph serves meta/llama"),
        ({"model": "llama", "decode_gpus": 4}, "decode_gpus: measured with 4, but a replica has 1"),
    ],
)
def test_a_profile_of_others_is_refused(build, profile_file, changes, said):
    """With the file, the key and the remedy."""
    with pytest.raises(ConfigError, match=f"planner.sla.profile: .*profile.json: {said}"):
        planning_profile(build().spec, profile_file(**changes))
