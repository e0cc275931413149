"""A full disk under state and logs: crashed workers come back, and the file is right again once there is room."""

import json
import shutil
import subprocess
import sys

import pytest

INSIDE = """
import json, os, pathlib, signal, subprocess, sys, time, urllib.request

folder, manifest, port = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
os.environ |= {"PENSTOCK_LOCAL_STATE_DIR": str(folder / "state"), "HOME": str(folder)}
penstock = [sys.executable, "-m", "penstock.cli"]
statefile = folder / "state" / "world.json"


def state():
    return json.loads(statefile.read_text())


def eventually(condition):
    deadline_s = time.monotonic() + 30
    while not (value := condition()):
        assert time.monotonic() < deadline_s, (folder / "log" / "arbiter.log").read_text()
        time.sleep(0.1)
    return value


def serves():
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


flags = ["--port", port, "--no-planner", "--speed", "20", "--log-dir", str(folder / "log")]
subprocess.run([*penstock, "up", manifest, *flags], check=True, stdout=sys.stderr)
try:
    fill = os.open(folder / "fill", os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(fill, bytes(4096)):
            pass
    except OSError:
        os.close(fill)
    before = state()["world_decode"]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lambda: not pathlib.Path(f"/proc/{before['pid']}").exists())
    served = bool(eventually(serves))
    stale = state()["world_decode"] == before
    (folder / "fill").unlink()
    after = eventually(lambda: (entry := state()["world_decode"])["restarts"] and entry)
    alive = pathlib.Path(f"/proc/{after['pid']}").exists()
    print(json.dumps({"served": served, "stale": stale, "restarts": after["restarts"], "alive": alive}))
finally:
    subprocess.run([*penstock, "down", "--now"], check=True, stdout=sys.stderr)
"""


def _can_mount():
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-rm", "true"], check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not _can_mount(), reason="needs user namespaces to mount a small tmpfs")
def test_a_worker_that_dies_on_a_full_disk_is_restarted_and_recorded_once_there_is_room(world):
    """Requests are served again while nothing can be written; then the file names the new process."""
    disk = world.folder / "disk"
    disk.mkdir()
    command = ["unshare", "-rm", sys.executable, "-c", INSIDE, disk, world.manifest(), world.port]
    done = subprocess.run(
        list(map(str, command)), env=world.env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"served": True, "stale": True, "restarts": 1, "alive": True}, done.stderr
