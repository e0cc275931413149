"""Processes under test, and what they answer over HTTP."""

import os
import re
import signal
import subprocess
import time
import urllib.request

import openai
import orjson
from reserved_ports import reserved_port

STARTUP_S = 1800
"""Two idle cores import and start a vLLM in one to two minutes, loaded ones in ten and more."""
LEASE_S = 12
"""Of the pair of workers. Chosen: long enough for a busy machine, short enough to wait for its end."""
SENTENCE = "The gate lets through what the turbine can use, and the rest flows over the weir. "
"""Of which prompts are made."""
GREEDY = {"model": "tiny", "max_tokens": 24, "temperature": 0}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    # For /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
    # Prefill then writes down each renewal of a lease.
    "VLLM_LOGGING_LEVEL": "DEBUG",
}


def text_of(events):
    """Return the text of a stream's events, of a completion or a chat."""
    choices = [choice for event in events for choice in event.choices]
    return "".join((each.delta.content if hasattr(each, "delta") else each.text) or "" for each in choices)


class Endpoint:
    """A worker or a router, by its address."""

    def __init__(self, url):
        self.url = url

    def post(self, path="/v1/completions", *, timeout_s=120, **body):
        """Return the JSON answer of a request sent here, without the router."""
        request = urllib.request.Request(
            self.url + path, orjson.dumps(body), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return orjson.loads(answer.read())

    def stream(self, path="/v1/completions", *, timeout_s=120, **body):
        """Return the data of all events of a streamed answer."""
        request = urllib.request.Request(
            self.url + path, orjson.dumps(body), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            lines = answer.read().decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    def get(self, path):
        """Return a page."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def metric(self, name, **labels):
        """Return the sum of a metric's samples that carry the labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in self.get("/metrics").splitlines() if re.split("[{ ]", line)[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))

    def until(self, condition, within_s=60):
        """Wait for a condition."""
        deadline_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline_s, "condition not met in time"
            time.sleep(0.1)

    def client(self):
        """Return the official client; no retries, so that errors show."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=300)


class Process(Endpoint):
    """A child with a session of its own, so that all its children can be stopped with it."""

    def __init__(self, name, argv, folder, **environment):
        self.log = folder / f"{name}.log"
        port = reserved_port()
        super().__init__(f"http://127.0.0.1:{port}")
        argv = [each.replace("{port}", str(port)) for each in argv]
        environment = {**os.environ, **ENVIRONMENT, **environment}
        with self.log.open("wb") as out:
            self._child = subprocess.Popen(
                argv, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def signal_all(self, number):
        """Signal the child and all that it has started."""
        os.killpg(self._child.pid, number)

    def stop(self):
        """End it, unless it has ended."""
        if self._child.poll() is not None:
            return
        self.signal_all(signal.SIGCONT)
        self._child.terminate()
        try:
            self._child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.signal_all(signal.SIGKILL)
            self._child.wait(timeout=10)

    def wait_for(self, path):
        """Wait until a path answers 200."""
        deadline_s = time.monotonic() + STARTUP_S
        while time.monotonic() < deadline_s:
            assert self._child.poll() is None, self.log.read_text()[-4000:]
            try:
                with urllib.request.urlopen(self.url + path, timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(f"{path} did not answer 200:\n{self.log.read_text()[-4000:]}")
