"""A node whose pods are processes of this machine: each has an address of its own, real probes, and ends as a kubelet ends it.

Only what Penstock's own pods use is there: one container of this checkout's Python, literal and referenced variables,
ConfigMaps and Secrets as files, an HTTP readiness probe, a preStop sleep, and the account's token as a kubeconfig.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ClusterError, NotFoundError, PenstockError
from penstock.core.http.client import ConnectionPool, Timeouts
from penstock.kube.informer import Informer
from penstock.kube.kinds import CONFIG_MAP, NODE, POD, SECRET

ME = "node-agent"
_ANY_ADDRESSES = frozenset(("0.0.0.0", "::"))
_TRIES = 8
_ALL_PORTS = re.compile(r"tcp://(\*|\[::\]):")
_VARIABLE = re.compile(r"\$\(([A-Z_][A-Z0-9_]*)\)")


@contextlib.contextmanager
def addresses():
    """Give addresses that this machine takes for its own, and an EndpointSlice may name; skip the test without the right."""
    if shutil.which("ip") is None:
        pytest.skip("pods need addresses: no ip on PATH")
    for _ in range(_TRIES):
        block = f"198.18.{secrets.randbelow(256)}"  # RFC 2544: of no network
        route = ("local", f"{block}.0/24", "dev", "lo")
        done = subprocess.run(["ip", "route", "add", *route], capture_output=True, text=True, check=False)
        if "File exists" not in done.stderr:  # another test's, at the same time
            break
    if done.returncode:
        pytest.skip(f"pods need addresses: ip route add {' '.join(route)}: {done.stderr.strip()}")
    try:
        yield (f"{block}.{last}" for last in _last_numbers())
    finally:
        subprocess.run(["ip", "route", "del", *route], check=False)


def _last_numbers():
    for number in count():
        yield 1 + number % 250


class NodeAgent:
    """Runs the pods that the scheduler gives its node.

    Attributes:
        crashed: Pods whose process ended unasked, with its code.
        logs: Folder of what the processes say, a file a pod.
    """

    def __init__(self, plane, client, free_addresses, folder: Path) -> None:
        self.crashed: list[tuple[str, int]] = []
        self.logs = folder / "logs"
        self.logs.mkdir()
        self._plane, self._client, self._addresses, self._folder = plane, client, free_addresses, folder
        self._pods = Informer(client, POD, namespace=None, on_change=self._changed)
        self._files = Informer(client, CONFIG_MAP, namespace="default", on_change=self._write_again)
        self._mounted: dict[str, list[Path]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._kubeconfigs: dict[str, Path] = {}
        self._http = ConnectionPool()

    @contextlib.asynccontextmanager
    async def on(self, *, gpus):
        """Register the node, run its pods while the body runs, and end them."""
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "500", "nvidia.com/gpu": str(gpus)}
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Agent", "message": ""}],
        }
        labels = {"kubernetes.io/hostname": ME}
        await self._client.create(NODE.of({"name": ME, "labels": labels}, status=status), field_manager=ME)
        watches = [asyncio.create_task(each.run()) for each in (self._pods, self._files)]
        try:
            yield self
        finally:
            tasks = [*watches, *self._tasks.values()]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.close()

    def _changed(self, change, pod):
        uid = pod["metadata"]["uid"]
        if pod["spec"].get("nodeName") != ME:
            return
        if uid not in self._tasks and change != "DELETED":
            self._leaving[uid] = asyncio.Event()
            self._tasks[uid] = asyncio.create_task(self._run(pod, self._leaving[uid]))
        if change == "DELETED" or "deletionTimestamp" in pod["metadata"]:
            self._leaving.setdefault(uid, asyncio.Event()).set()

    def _write_again(self, _change, config_map):
        """Bring a changed ConfigMap to the pods that mount it, as a kubelet does."""
        for folder in self._mounted.get(config_map["metadata"]["name"], ()):
            _write(folder, config_map.get("data", {}))

    async def _run(self, pod, leaving):
        """Be a pod: start, become ready, leave."""
        about, spec = pod["metadata"], pod["spec"]
        address = next(self._addresses)
        (container,) = spec["containers"]
        process = await self._started(pod, container, address)
        gone, told = asyncio.create_task(process.wait()), asyncio.create_task(leaving.wait())
        serve = asyncio.create_task(self._serve(pod, container, address))
        try:
            await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
            serve.cancel()
            if not told.done():
                self.crashed.append((about["name"], process.returncode))
                await self._set_status(pod, address, is_ready=False, phase="Failed")
                await told
            elif not gone.done():
                await self._end(process, gone, container, spec["terminationGracePeriodSeconds"])
        finally:
            for each in (gone, told, serve):
                each.cancel()
            await asyncio.gather(gone, told, serve, return_exceptions=True)
            if process.returncode is None:
                process.kill()
                await process.wait()
        with contextlib.suppress(NotFoundError):
            where = {"namespace": about["namespace"], "uid": about["uid"], "grace_s": 0}
            await self._client.delete(POD, about["name"], **where)

    async def _end(self, process, gone, container, grace_s):
        """End a process as a kubelet does: the hook, SIGTERM, and at the end of the grace period SIGKILL."""
        hook = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.sleep(hook)
                process.send_signal(signal.SIGTERM)
                await asyncio.shield(gone)

    async def _started(self, pod, container, address):
        """Start a pod's process as soon as the API server says what it needs."""
        while True:
            try:
                return await self._start(pod, container, address)
            except ClusterError:  # away, or the account is yet to be made
                await asyncio.sleep(1.0)

    async def _start(self, pod, container, address):
        folder = self._folder / pod["metadata"]["uid"]
        paths = await self._mount(pod, container, folder)
        variables = await self._variables(pod, container, address)
        account = pod["spec"]["serviceAccountName"]
        if pod["spec"].get("automountServiceAccountToken"):
            if account not in self._kubeconfigs:
                where = (pod["metadata"]["namespace"], account)
                self._kubeconfigs[account] = await asyncio.to_thread(
                    self._plane.service_account_kubeconfig, *where
                )
            variables["KUBECONFIG"] = str(self._kubeconfigs[account])
        argv = [self._filled(each, variables, paths, address) for each in container.get("args", ())]
        assert container["command"] == ["python"]
        with (self.logs / pod["metadata"]["name"]).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, *argv, env={**os.environ, **variables}, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, cwd=folder,
            )  # fmt: skip

    @staticmethod
    def _filled(text, variables, paths, address):
        """Return an argument as this machine understands it: its variables, its files, the pod's own address."""
        text = _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)
        for inside, outside in paths.items():
            text = text.replace(inside, str(outside))
        return address if text in _ANY_ADDRESSES else _ALL_PORTS.sub(f"tcp://{address}:", text)

    async def _mount(self, pod, container, folder):
        """Write the volumes' files; return the folder of each mounted path."""
        sources = {each["name"]: each for each in pod["spec"]["volumes"]}
        paths = {}
        for mount in container.get("volumeMounts", ()):
            source = sources[mount["name"]]
            place = folder / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            if "configMap" in source:
                name = source["configMap"]["name"]
                _write(place, await self._data(CONFIG_MAP, name, pod))
                self._mounted.setdefault(name, []).append(place)
            elif "secret" in source:
                _write(place, await self._data(SECRET, source["secret"]["secretName"], pod))
            if mount["mountPath"] != "/tmp":
                paths[mount["mountPath"]] = place
        return paths

    async def _data(self, kind, name, pod):
        """Return the texts of a ConfigMap or Secret."""
        found = await self._client.get(kind, name, namespace=pod["metadata"]["namespace"])
        data = found.get("data", {})
        return (
            data
            if kind is CONFIG_MAP
            else {key: base64.b64decode(each).decode() for key, each in data.items()}
        )

    async def _variables(self, pod, container, address):
        found: dict[str, str] = {}
        for each in container.get("envFrom", ()):
            found |= await self._data(CONFIG_MAP, each["configMapRef"]["name"], pod)
        for each in container.get("env", ()):
            if "valueFrom" not in each:
                value = each.get("value", "")
                found[each["name"]] = _VARIABLE.sub(lambda known: found.get(known[1], known[0]), value)
            elif "fieldRef" in each["valueFrom"]:
                known = {"status.podIP": address, "metadata.name": pod["metadata"]["name"]}
                found[each["name"]] = known[each["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                ref = each["valueFrom"]["secretKeyRef"]
                found[each["name"]] = (await self._data(SECRET, ref["name"], pod))[ref["key"]]
        return found

    async def _serve(self, pod, container, address):
        """Say that a pod runs, and from then on whether it is ready."""
        await self._set_status(pod, address, is_ready=False)
        await self._probe(pod, container, address)

    async def _probe(self, pod, container, address):
        """Ask what the readiness probe asks, and write down each change."""
        probe = container["readinessProbe"]
        get, failures, was_ready = probe["httpGet"], 0, False
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == get["port"]]
        url = f"http://{address}:{port}{get['path']}"
        while True:
            try:
                answer = await self._http.request(
                    "GET", url, timeouts=Timeouts(total_s=probe["timeoutSeconds"])
                )
                failures = 0 if answer.status == 200 else failures + 1
            except PenstockError:
                failures += 1
            is_ready = not failures or (was_ready and failures < probe["failureThreshold"])
            if is_ready != was_ready and await self._set_status(pod, address, is_ready=is_ready):
                was_ready = is_ready
            await asyncio.sleep(1.0 if was_ready else 0.2)

    async def _set_status(self, pod, address, *, is_ready, phase="Running"):
        """Write a pod's status; return whether that reached the API server."""
        (container,) = pod["spec"]["containers"]
        ready = "True" if is_ready else "False"
        state: dict[str, Any] = {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}
        if phase == "Failed":
            state = {"terminated": {"exitCode": 1}}
        status = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                *({"type": each, "status": ready} for each in ("Ready", "ContainersReady")),
            ],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": is_ready,
                    "started": True,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        about = pod["metadata"]
        where = {"namespace": about["namespace"], "subresource": "status", "field_manager": ME}
        try:
            await self._client.patch(POD, about["name"], {"status": status}, **where)
        except ClusterError:  # the pod may be gone, the server away
            return False
        return True


def _write(folder, files):
    """Write files so that a reader never sees half of one."""
    for name, text in files.items():
        fresh = folder / f".{name}"
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(folder / name)
