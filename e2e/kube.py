"""kubectl, helm and waiting, as the tests use them; everything says what it waits for and how long."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

GRAPH_LABEL = "penstock.dev/graph"
ROLE_LABEL = "penstock.dev/role"
OUTPUT = Path(os.environ.get("PENSTOCK_E2E_OUTPUT", Path(__file__).resolve().parents[1] / "e2e-output"))
"""Where diagnostics of failed tests go."""
WORKERS = "prefill,decode,aggregated"
EVERYTHING = (
    "deployments,replicasets,pods,services,endpointslices,configmaps,serviceaccounts,roles,rolebindings,"
    "poddisruptionbudgets,networkpolicies,scalingadapters,graphdeployments"
)
"""Kinds that a graph leaves nothing of."""
SYSTEM = "penstock-system"
"""Namespace of the release."""


def say(text: str) -> None:
    """Print with the time of day; -s or a failure shows it."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def wait_for(what: str, probe: Callable[[], T], timeout_s: float = 120.0, *, every_s: float = 1.0) -> T:
    """Return the first true value of ``probe``; fail with the last one after ``timeout_s``.

    A failing kubectl counts as false: the cluster may be busy or the object not there yet.
    """
    say(f"waiting up to {timeout_s:g} s: {what}")
    began_s = time.monotonic()
    last: Any = None
    while True:
        try:
            last = probe()
        except subprocess.CalledProcessError as exc:
            last = (exc.stderr or "").strip()
        else:
            if last:
                say(f"  after {time.monotonic() - began_s:.0f} s")
                return last
        if time.monotonic() - began_s > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}; last seen: {last!r}")
        time.sleep(every_s)


class Kube:
    """One cluster, through its kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self.env = {**os.environ, "KUBECONFIG": str(kubeconfig)}

    def run(self, *command: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Run a program against the cluster and return what it printed."""
        result = subprocess.run(
            command,
            input=stdin,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if result.returncode != 0:
            say(f"  {' '.join(command)}: exit {result.returncode}: {result.stderr.strip()}")
            result.check_returncode()
        return result.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Run kubectl."""
        return self.run("kubectl", *arguments, stdin=stdin, timeout_s=timeout_s)

    def get(self, *arguments: str) -> Any:
        """Return an object, or a list's items."""
        found = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return found["items"] if found["kind"] == "List" else found

    def apply(self, *objects: dict[str, Any], namespace: str) -> None:
        """Apply objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--namespace", namespace, "--filename=-", stdin=text)

    def helm(self, *arguments: str) -> str:
        """Run helm."""
        return self.run("helm", *arguments, timeout_s=300.0)

    @contextmanager
    def forwarded(self, namespace: str, target: str, port: int) -> Iterator[str]:
        """Yield a URL that leads to a Service's or a pod's port."""
        process = subprocess.Popen(
            ["kubectl", "port-forward", "--namespace", namespace, target, f":{port}"],
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # Forwarding from 127.0.0.1:40123 -> 8000
            assert "Forwarding from" in line, f"kubectl port-forward {target}: {line!r}"
            yield f"http://{line.split()[2]}"
        finally:
            process.terminate()
            process.communicate(timeout=10)

    def dump(self, folder: Path, namespaces: list[str]) -> None:
        """Write what explains a failure: objects, Events and logs of the namespaces, and the nodes."""
        folder.mkdir(parents=True, exist_ok=True)

        def keep(name: str, *arguments: str) -> str:
            result = subprocess.run(
                ["kubectl", *arguments], env=self.env, capture_output=True, text=True, check=False, timeout=60
            )
            if result.returncode == 0:  # a container that never restarted has no log from before
                (folder / name).write_text(result.stdout)
            return result.stdout

        keep("nodes.txt", "describe", "nodes")
        for namespace in namespaces:
            scope = ("--namespace", namespace)
            keep(f"{namespace}.events.txt", "get", "events", *scope, "--sort-by=.lastTimestamp")
            keep(f"{namespace}.graphs.yaml", "get", "gd,gsa,leases", *scope, "--output=yaml")
            keep(
                f"{namespace}.objects.yaml",
                "get",
                "all,cm,endpointslices,pdb,netpol",
                *scope,
                "--output=yaml",
            )
            keep(f"{namespace}.describe.txt", "describe", "gd,gsa,pods", *scope)
            for pod in keep(f"{namespace}.pods.txt", "get", "pods", *scope, "--output=name").split():
                name = pod.removeprefix("pod/")
                keep(f"{namespace}.{name}.log", "logs", *scope, name, "--all-containers", "--tail=2000")
                keep(f"{namespace}.{name}.log-before", "logs", *scope, name, "--previous", "--tail=200")
        say(f"diagnostics: {folder}")


class Graph:
    """One GraphDeployment in a namespace of its own."""

    def __init__(self, kube: Kube, namespace: str, name: str) -> None:
        self.kube, self.namespace, self.name = kube, namespace, name
        self.scope = ("--namespace", namespace)

    def object(self) -> dict[str, Any]:
        """The GraphDeployment."""
        found: dict[str, Any] = self.kube.get("graphdeployment", self.name, *self.scope)
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """One condition; empty if it is not there."""
        conditions = self.object().get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def is_ready(self) -> bool:
        """Whether the graph says that its newest generation serves and that every replica is there."""
        found = self.object()
        status = found.get("status", {})
        return (
            status.get("observedGeneration") == found["metadata"]["generation"]
            and status.get("phase") == "Ready"
        )

    def pods(self, roles: str = WORKERS) -> list[dict[str, Any]]:
        """Pods of some roles, terminating ones included."""
        selector = f"{GRAPH_LABEL}={self.name},{ROLE_LABEL} in ({roles})"
        found: list[dict[str, Any]] = self.kube.get("pods", *self.scope, f"--selector={selector}")
        return found

    def ready(self, roles: str) -> int:
        """Ready pods of some roles that are not leaving."""
        return sum(is_ready(pod) for pod in self.pods(roles))

    def gpus(self) -> int:
        """GPUs of existing workers: let out of the budget's gate and not finished; terminating ones count."""
        return sum(
            int(pod["metadata"]["annotations"]["penstock.dev/gpus"])
            for pod in self.pods()
            if not pod["spec"].get("schedulingGates")
            and pod["status"].get("phase") not in {"Succeeded", "Failed"}
        )

    def remains(self) -> list[str]:
        """Objects that carry the graph's label, as kind/name."""
        found = self.kube.get(EVERYTHING, *self.scope, f"--selector={GRAPH_LABEL}={self.name}")
        return [f"{each['kind']}/{each['metadata']['name']}" for each in found]

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        """Wait until the graph is ready."""
        wait_for(f"graph {self.name} is Ready", self.is_ready, timeout_s)

    def patch(self, spec: dict[str, Any]) -> None:
        """Merge into the graph's spec."""
        body = json.dumps({"spec": spec})
        self.kube.kubectl("patch", "gd", self.name, *self.scope, "--type=merge", f"--patch={body}")


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod is ready and not leaving."""
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def merge(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """Lay ``changes`` over ``base``, map by map."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
