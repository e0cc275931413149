"""The sample of real vLLM without a GPU, as `penstock up` runs it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import openai
import yaml
from endpoint import STARTUP_S
from reserved_ports import reserved_port

SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "vllm-cpu.yaml"


class UpGraph:
    """The sample's graph, as `penstock up` runs it."""

    def __init__(self, folder):
        self.statefile = folder / "state" / "tiny.json"
        self._folder = folder
        self._environment = {**os.environ, "PENSTOCK_LOCAL_STATE_DIR": str(folder / "state")}
        self.url = f"http://127.0.0.1:{reserved_port()}"

    def run(self, *words, timeout_s=60):
        """Run a `penstock` command; return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", *words],
            check=False,
            env=self._environment,
            timeout=timeout_s,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self, *flags, change=lambda spec: None):
        """Start it, its spec changed before."""
        manifest = yaml.safe_load(SAMPLE.read_text())
        for service in manifest["spec"]["services"].values():
            if service["role"] != "router":
                service["startupTimeoutSeconds"] = STARTUP_S
        change(manifest["spec"])
        manifest["spec"]["model"]["name"] = os.environ["PENSTOCK_VLLM_MODEL"]
        manifest["spec"]["engine"]["pythonEnvironment"] = str(Path(os.environ["PENSTOCK_VLLM"]).parents[1])
        path = self._folder / "graph.yaml"
        path.write_text(yaml.safe_dump(manifest))
        port = self.url.rpartition(":")[2]
        log_dir = str(self._folder / "log")
        self.run(
            "up",
            str(path),
            "--port",
            port,
            "--log-dir",
            log_dir,
            "--timeout",
            str(STARTUP_S),
            *flags,
            timeout_s=STARTUP_S + 100,
        )

    def down(self):
        """Stop it, also where it never came up."""
        if self.statefile.exists():
            self.run("down", "--now")

    def processes(self, role):
        """Return what `penstock status` says of a role's processes."""
        found = json.loads(self.run("status", "--json"))["processes"]
        return [each for each in found if each["role"] == role]

    def ready(self, role):
        """Return how many processes of a role are ready, and how many there are."""
        found = self.processes(role)
        return sum(each["state"] == "ready" for each in found), len(found)

    def client(self):
        """Return the official client; no retries, so that losses show."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=900)

    async def until(self, condition, within_s=STARTUP_S):
        """Wait for a condition, which may need another vLLM."""
        async with asyncio.timeout(within_s):
            while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - processes, watched from outside
                await asyncio.sleep(1)
