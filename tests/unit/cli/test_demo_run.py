"""The demo's own steps: its folder, its policy, and the load run that it stops."""

import asyncio
import sys
from importlib import resources
from pathlib import Path

import pytest

from penstock.api.manifests import load_graph
from penstock.cli.demo import with_policy
from penstock.cli.demo_steps import clear, end_load
from penstock.core.errors import ConfigError
from penstock.router.policy.registry import policy_names

STUBBORN = """
import pathlib, signal, sys, time
def on_signal(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write("stopped\\n")
    sys.exit(1)
signal.signal(signal.SIGTERM, on_signal)
print("ready", flush=True)
time.sleep(3600)
"""


def test_a_demo_below_a_file_is_refused_with_the_remedy(tmp_path):
    """A file in the way is a mistake in --output-dir, told before anything starts."""
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"--output-dir .*/file/x: .*parents is a file; choose another folder"
    ):
        clear(tmp_path / "file" / "x")


async def test_a_load_run_that_is_stopped_gets_one_signal_and_time_for_its_summary(tmp_path):
    """A second signal would make it leave its summary out, and the demo its report."""
    written = tmp_path / "summary"
    replay = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUBBORN, str(written), stdout=asyncio.subprocess.PIPE
    )
    await replay.stdout.readline()
    await end_load(replay)
    assert (replay.returncode, written.read_text()) == (1, "stopped\n")
    await end_load(replay)


@pytest.mark.parametrize("policy", policy_names())
def test_only_the_policy_differs(tmp_path, policy):
    """The file is a graph like the first except for the router's policy."""
    with resources.as_file(resources.files("penstock.cli") / "data" / "demo.yaml") as manifest:
        changed = load_graph(with_policy(Path(manifest), policy, tmp_path))
        own = load_graph(Path(manifest))
    assert changed.spec.router.policy == policy
    router = own.spec.router.model_copy(update={"policy": policy})
    assert changed.spec == own.spec.model_copy(update={"router": router})
