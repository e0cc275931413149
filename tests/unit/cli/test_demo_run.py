"""The demo's own steps: its folder, its policy, and the load run that it stops."""

import asyncio
import sys

import pytest

from penstock.cli.demo_run import clear, end_load
from penstock.core.errors import ConfigError

STUBBORN = """
import pathlib, signal, sys, time
def on_signal(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write("stopped\\n")
    sys.exit(1)
signal.signal(signal.SIGTERM, on_signal)
print("ready", flush=True)
time.sleep(60)
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
