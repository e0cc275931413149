"""A full disk under state and logs: it is said, crashed workers come back, and the file is right once there is room."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import LIMIT_S

INSIDE = """
import json, os, pathlib, subprocess, sys, urllib.request

sys.path.insert(0, sys.argv[1])
from conftest import World, eventually

folder = pathlib.Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True)
world = World(folder)


def is_alive(entry):
    return pathlib.Path(f"/proc/{entry['pid']}").exists()


def serves():
    try:
        return world.complete(max_tokens=2)
    except OSError:
        return None


world.up(pathlib.Path(sys.argv[3]), speed=20)
try:
    with (folder / "fill").open("wb", buffering=0) as fill:
        try:
            while fill.write(bytes(4096)):
                pass
        except OSError:
            pass
    full = f"the disk of {folder} is full"
    doctor = world.run("doctor", "--local", "--json", "--namespace", "world")
    report = json.loads(doctor.stdout)
    said = {
        "doctor": doctor.returncode == 1
        and any(each["severity"] == "problem" and full in each["message"] for each in report["findings"]),
        "status": full in world.run("status", "--namespace", "world").stdout,
        "ui": any(full in each for each in json.load(urllib.request.urlopen(world.url + "/ui/state"))["problems"]),
    }
    before = world.state()["world_decode"]
    world.kill("world_decode")
    eventually(lambda: not is_alive(before), 30)
    served = bool(eventually(serves, 30))
    stale = world.state()["world_decode"] == before
    (folder / "fill").unlink()
    after = eventually(lambda: (entry := world.state()["world_decode"])["restarts"] and entry, 30)
    found = {"served": served, "stale": stale, "restarts": after["restarts"], "alive": is_alive(after), "said": said}
    print(json.dumps(found))
finally:
    world.run("down", "--now")
"""


def _can_mount():
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-rm", "true"], check=False).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(not _can_mount(), reason="needs user namespaces to mount a small tmpfs")
def test_a_worker_that_dies_on_a_full_disk_is_restarted_and_recorded_once_there_is_room(world):
    """Requests are served again while nothing can be written; then the file names the new process."""
    disk = world.folder / "disk"
    disk.mkdir()
    plumbing = Path(__file__).parent
    command = ["unshare", "-rm", sys.executable, "-c", INSIDE, plumbing, disk, world.manifest()]
    done = subprocess.run(
        list(map(str, command)), env=world.env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found.pop("said").values()), done.stdout
    assert found == {"served": True, "stale": True, "restarts": 1, "alive": True}, done.stderr
