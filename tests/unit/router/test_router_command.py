"""`penstock router serve`: what it takes from flags and manifest, and what it refuses."""

import pytest
from click.testing import CliRunner

from penstock.api import AdmissionConfig
from penstock.cli import router as command
from penstock.cli.simulate import simulate
from penstock.core.errors import ConfigError, InvalidSpecError
from penstock.router.policy.busy import BusyThresholds, busy_thresholds
from penstock.router.proxy.auth import API_KEYS
from penstock.router.settings import GraphReference

MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: llama}
spec:
  model: {name: meta-llama/Llama-3.1-8B-Instruct, servedName: llama, contextTokens: 16384}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill}
    decode: {role: decode}
  router: {policy: round-robin, auth: {apiKeysFile: %s}}
"""


@pytest.fixture
def settings_of(monkeypatch):
    """Run the command up to the point where it would serve; return its settings."""

    def run(*arguments, environment=None):
        seen = []

        class Server:
            def __init__(self, settings, tracing, *, inherited_socket):
                settings.check()
                seen.append(settings)
                self.serve = None

        monkeypatch.setattr(command, "RouterServer", Server)
        monkeypatch.setattr(command.loop, "run", lambda main: None)
        result = CliRunner().invoke(
            command.router, ["serve", *map(str, arguments)], env=environment, catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        return seen[0]

    return run


def test_a_manifest_gives_model_roles_and_policy(settings_of, tmp_path):
    """Flags add where to listen and where to find the workers."""
    keys = tmp_path / "keys"
    keys.write_text("alpha\n")
    manifest = tmp_path / "graph.yaml"
    manifest.write_text(MANIFEST % keys)

    settings = settings_of(
        "--graph", manifest, "--discovery", tmp_path / "s.json", "--port", "1234", "--speed", "20"
    )

    assert (settings.model, settings.graph.model.context_tokens) == ("llama", 16384)
    assert settings.disaggregated
    assert (settings.config.policy, settings.port, settings.speed) == ("round-robin", 1234, 20)
    assert settings.statefile == tmp_path / "s.json"
    assert settings.api_keys == {b"alpha"}


def test_flags_go_before_the_manifest(settings_of, tmp_path):
    """Policy, model name and keys."""
    manifest, keys = tmp_path / "graph.yaml", tmp_path / "other"
    manifest.write_text(MANIFEST % "/nowhere")
    keys.write_text("beta\n")

    settings = settings_of(
        *("--graph", manifest, "--discovery", "s.json", "--policy", "least-loaded"),
        *("--model", "other", "--api-keys-file", keys),
        environment={API_KEYS.variable: "gamma"},
    )

    assert (settings.model, settings.config.policy) == ("other", "least-loaded")
    assert settings.api_keys == {b"beta", b"gamma"}


@pytest.mark.parametrize(
    ("roles", "disaggregated"), [(("prefill", "decode"), True), (("aggregated", "aggregated"), False)]
)
def test_a_fixed_fleet_needs_no_manifest(settings_of, roles, disaggregated):
    """Its roles tell whether there are two stages."""
    flags = [f"--worker={role}=http://127.0.0.1:{number}" for number, role in enumerate(roles, 1)]

    settings = settings_of("--model", "llama", *flags)

    assert settings.disaggregated is disaggregated
    assert len(settings.workers) == 2


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PENSTOCK_API_KEYS", ""),
        ("PENSTOCK_ADMIN_KEYS", " , "),
        ("PENSTOCK_API_KEYS_FILE", ""),
        ("PENSTOCK_ADMIN_KEYS_FILE", " "),
    ],
)
def test_blank_keys_open_no_frontend(settings_of, variable, value):
    """Set without a key, a variable is a mistake: the router does not start, and says what to do."""
    with pytest.raises(ConfigError, match=f"{variable}: .* unset it"):
        settings_of("--model", "m", "--discovery", "s.json", environment={variable: value})


def test_admin_keys_are_keys_of_their_own(settings_of, tmp_path):
    """From file and environment, and none of them a client's."""
    keys = tmp_path / "admin"
    keys.write_text("root\n")
    flags = ("--model", "m", "--discovery", "s.json", "--admin-keys-file", keys)

    settings = settings_of(*flags, environment={"PENSTOCK_ADMIN_KEYS": "other", "PENSTOCK_API_KEYS": "x"})
    assert (settings.admin_keys, settings.api_keys) == ({b"root", b"other"}, {b"x"})
    assert "root" not in str(settings.shown())
    with pytest.raises(ConfigError, match="a client's API key is an admin key as well"):
        settings_of(*flags, environment={"PENSTOCK_API_KEYS": "root"})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--discovery", "s.json"], ConfigError, "--model: required"),
        (["--model", "m"], ConfigError, "--discovery STATEFILE or --worker"),
        (["--model", "m", "--worker", "decode=http://a:1", "--discovery", "s"], ConfigError, "not both"),
        (["--model", "m", "--worker", "decode"], ConfigError, "role=http://host:port"),
        (["--model", "m", "--worker", "decode=http://a:1"], ConfigError, "needs decode and prefill"),
        (["--graph", "/nowhere.yaml", "--discovery", "s.json"], ConfigError, "/nowhere.yaml"),
        (["--model", "m", "--discovery", "kubernetes"], ConfigError, "--graph"),
        (["--model", "m", "--discovery", "s", "--api-keys-file", "/nowhere"], ConfigError, "--api-keys-file"),
    ],
)
def test_what_cannot_work_is_one_clear_error(settings_of, arguments, error, words):
    """Before anything listens, with the flag and the remedy."""
    assert issubclass(InvalidSpecError, error)
    with pytest.raises(error, match=words):
        settings_of(*arguments)


def test_admission_flags_go_before_the_manifest(settings_of, tmp_path):
    """As in simulate; what no flag names stays the manifest's, also once the manifest has changed."""
    manifest = tmp_path / "graph.yaml"
    manifest.write_text(
        MANIFEST.replace(", auth: {apiKeysFile: %s}", ", admission: {activePrefillTokensThreshold: 7}")
    )
    settings = settings_of(
        *("--graph", manifest, "--discovery", "s.json", "--admission-control", "token-capacity"),
        *("--active-decode-blocks-threshold", "0.5", "--retry-after-seconds", "3"),
    )

    held = settings.admission(settings.config.admission)
    assert busy_thresholds(held) == BusyThresholds(0.5, 7)
    assert held.retry_after_seconds == 3
    assert busy_thresholds(settings.admission(AdmissionConfig())) == BusyThresholds(0.5, 100_000)


def test_a_threshold_without_a_mode_is_refused_as_simulate_refuses_it(settings_of):
    """It would change nothing."""
    flags = ("--active-prefill-tokens-threshold", "100")
    words = (
        "--active-prefill-tokens-threshold: without effect under admission mode none; add --admission-control"
    )
    with pytest.raises(ConfigError, match=words):
        settings_of("--model", "m", "--discovery", "s.json", *flags)
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(simulate, ["--trace", "poisson:rate=1,count=2", *flags], catch_exceptions=False)


def test_kubernetes_discovery_takes_the_graphs_name(settings_of, tmp_path):
    """The graph's name selects the EndpointSlices; the namespace is the flag's or found out later."""
    manifest = tmp_path / "graph.yaml"
    manifest.write_text(MANIFEST.replace(", auth: {apiKeysFile: %s}", ""))

    plain = settings_of("--graph", manifest, "--discovery", "kubernetes")
    placed = settings_of("--graph", manifest, "--discovery", "kubernetes", "--namespace", "serving")

    assert (plain.kubernetes, plain.statefile) == (GraphReference("llama", None), None)
    assert placed.kubernetes == GraphReference("llama", "serving")
    assert placed.shown()["discovery"] == "kubernetes: llama"
