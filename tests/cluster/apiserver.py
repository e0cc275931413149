"""A real Kubernetes control plane for tests and benchmarks: etcd and kube-apiserver on free ports of loopback.

kube-controller-manager, kube-scheduler and kwok (fake nodes and pods) are started on demand. Everything lives
in one temporary folder and ends with `ControlPlane.stop`, also the processes of a killed API server.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import yaml
from certificates import pem, write_certificates
from cryptography.hazmat.primitives.asymmetric import rsa
from reserved_ports import reserved_port

CRDS = Path(__file__).parents[2] / "crds"
ASSETS = "KUBEBUILDER_ASSETS"
NEEDED = ("etcd", "kube-apiserver")
ADMIN = "admin"
START_S = 60.0
"""Longest wait for a start; on a free machine it takes 3-4 s."""
CONTROLLERS = tuple(
    f"{name}-controller"
    for name in (
        "deployment",
        "replicaset",
        "statefulset",
        "job",
        "garbage-collector",
        "namespace",
        "serviceaccount",
        "endpoints",
        "endpointslice",
        "disruption",
        "node-lifecycle",
        "root-ca-certificate-publisher",
        "pod-garbage-collector",
        "resourcequota",
        "horizontal-pod-autoscaler",
        "clusterrole-aggregation",
    )
)
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
"""Nothing is left running when the tests themselves are killed."""
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


def missing_assets() -> str | None:
    """Return why no control plane can be started, or None if one can."""
    folder = os.environ.get(ASSETS)
    if not folder:
        return f"{ASSETS} is not set: needs the folder of etcd and kube-apiserver"
    absent = [name for name in NEEDED if not (Path(folder) / name).is_file()]
    return f"{ASSETS}: no {', '.join(absent)} in {folder}" if absent else None


def asset(name: str) -> str:
    """Return the path of one of the programs in KUBEBUILDER_ASSETS."""
    return str(Path(os.environ[ASSETS]) / name)


def own_address() -> str | None:
    """Return an address of this machine that the API takes in place of loopback; None where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # chooses a route; nothing is sent
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


class ControlPlane:
    """One API server with its etcd; a context manager.

    Attributes:
        folder: Temporary folder of everything; gone after `stop`.
        port: Of the API server.
        audit_log: One JSON object per finished request, level Metadata.
    """

    def __init__(self, *, extra_flags: tuple[str, ...] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-cluster-"))
        self.audit_log = self.folder / "audit.log"
        self._extra_flags = extra_flags
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tokens: dict[str, str] = {}
        self.port = reserved_port()
        self._etcd_port = reserved_port()

    def __enter__(self) -> Self:
        try:
            self._write_keys()
            self._start_etcd()
            self.start_api_server()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """URL of the API server."""
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of a cluster administrator."""
        return self.folder / "admin.kubeconfig"

    def kubeconfig_for(
        self, name: str, token: str, *, namespace: str = "default", file: bool = False
    ) -> Path:
        """Write a kubeconfig for a bearer token; with ``file`` the token is in ``NAME.token`` alongside it."""
        path = self.folder / f"{name}.kubeconfig"
        user: dict[str, Any] = {"token": token}
        if file:
            (self.folder / f"{name}.token").write_text(token)
            user = {"tokenFile": f"{name}.token"}
        self._write_kubeconfig(path, user, namespace)
        return path

    def certificate_kubeconfig(self) -> Path:
        """Write an administrator's kubeconfig with an inline client certificate; user ``certified-admin``."""
        encoded = {
            key: base64.b64encode((self.folder / file).read_bytes()).decode()
            for key, file in (("client-certificate-data", "client.crt"), ("client-key-data", "client.key"))
        }
        path = self.folder / "certificate.kubeconfig"
        self._write_kubeconfig(path, encoded, "default")
        return path

    def service_account_kubeconfig(self, namespace: str, name: str, *, seconds: int = 3600) -> Path:
        """Write a kubeconfig with a fresh token of an existing ServiceAccount."""
        token = self.kubectl(
            "create", "token", name, "--namespace", namespace, f"--duration={seconds}s"
        ).strip()
        return self.kubeconfig_for(f"{namespace}-{name}", token, namespace=namespace)

    def pid(self, name: str) -> int:
        """Return the process id of a component: ``etcd``, ``kube-apiserver``..."""
        return self._processes[name].pid

    def start_api_server(self) -> None:
        """Start the API server on the existing etcd and wait until it is ready."""
        self._spawn("kube-apiserver", self._api_server_flags())
        self.wait_ready()

    def kill(self, name: str) -> None:
        """Kill a component without a word, as kill -9 does."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def freeze(self, name: str) -> None:
        """Stop a component as if its machine hung: its connections stay open (SIGSTOP)."""
        os.kill(self.pid(name), signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a frozen component continue."""
        os.kill(self.pid(name), signal.SIGCONT)

    def restart_api_server(self) -> None:
        """Kill the API server and start it again on the same etcd and port."""
        self.kill("kube-apiserver")
        self.start_api_server()

    def start_controllers(self) -> None:
        """Start kube-controller-manager and kube-scheduler, once."""
        if "kube-controller-manager" in self._processes:
            return
        common = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1"]
        limits = ["--kube-api-qps=500", "--kube-api-burst=1000"]
        self._spawn(
            "kube-controller-manager",
            [
                *common,
                *limits,
                f"--secure-port={reserved_port()}",
                f"--service-account-private-key-file={self.folder}/sa.key",
                f"--root-ca-file={self.folder}/ca.crt",
                # Only what the tests look at; the rest costs processor time.
                f"--controllers={','.join(CONTROLLERS)}",
                "--horizontal-pod-autoscaler-sync-period=2s",
                # kwok's heartbeats come seldom; a node that counts as lost takes its pods' readiness with it for good.
                "--node-monitor-grace-period=1h",
            ],
        )
        self._spawn("kube-scheduler", [*common, *limits, f"--secure-port={reserved_port()}"])

    def start_kwok(self) -> None:
        """Start kwok, once: it keeps nodes ready and lets scheduled pods run, become ready and end."""
        if "kwok" not in self._processes:
            flags = [
                f"--kubeconfig={self.kubeconfig}",
                "--manage-all-nodes",
                f"--config={self._empty_config()}",
            ]
            self._spawn("kwok", flags)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as administrator and return its output.

        Raises:
            AssertionError: it failed; with what it said.
        """
        done = subprocess.run(
            [asset("kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects as the administrator."""
        manifest = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))

    def install_crds(self, *files: Path) -> None:
        """Install CustomResourceDefinitions, by default Penstock's, and wait until they are served."""
        for file in files or sorted(CRDS.glob("*.yaml")):
            self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(file))
            # kubectl's condition fails on an object whose conditions are null, as a new definition's are.
            self.kubectl(
                "wait", "--for=jsonpath={.status.conditions[0].type}", "--timeout=30s", "-f", str(file)
            )
            self.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(file))

    def audit_events(self, *, after: int = 0, user: str | None = None) -> list[dict[str, Any]]:
        """Return finished requests in order, from byte ``after`` of the log (see `audit_mark`).

        Args:
            after: Byte offset, the end of a line.
            user: Only those of this user.
        """
        with self.audit_log.open("rb") as log:
            log.seek(after)
            lines = log.read().split(b"\n")[:-1]
        events = [json.loads(line) for line in lines]
        return [each for each in events if user is None or each["user"].get("username") == user]

    def audit_writes(self, *, after: int = 0, user: str | None = None) -> list[dict[str, Any]]:
        """Return the writes among `audit_events`, without those to Leases."""
        return [
            each
            for each in self.audit_events(after=after, user=user)
            if each["verb"] in WRITES and each.get("objectRef", {}).get("resource") != "leases"
        ]

    def audit_mark(self) -> int:
        """Return the log's end, to be given as ``after`` later."""
        return self.audit_log.stat().st_size if self.audit_log.exists() else 0

    def wait_ready(self) -> None:
        """Wait until the API server answers that it is ready.

        Raises:
            RuntimeError: it ended or took too long; with the end of its log.
        """
        until_s = time.monotonic() + START_S
        request = urllib.request.Request(
            f"{self.url}/readyz", headers={"Authorization": f"Bearer {self._tokens[ADMIN]}"}
        )
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        process = self._processes["kube-apiserver"]
        while time.monotonic() < until_s and process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(request, context=context, timeout=5) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"kube-apiserver not ready:\n{self.log_tail('kube-apiserver')}")

    def log_tail(self, name: str, lines: int = 30) -> str:
        """Return the end of a component's log."""
        path = self.folder / f"{name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def stop(self) -> None:
        """End everything and remove the folder."""
        for name in reversed(list(self._processes)):
            process = self._processes.pop(name)
            # A stopped process (SIGSTOP) dies of SIGKILL too; nothing here is worth a graceful end.
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _spawn(self, name: str, flags: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self._processes[name] = subprocess.Popen(
                [*_ENDS_WITH_PARENT, asset(name), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                # An interrupt at the terminal goes to the tests, which then stop this in order.
                start_new_session=True,
            )

    def _start_etcd(self) -> None:
        peers = f"http://127.0.0.1:{reserved_port()}"
        clients = f"http://127.0.0.1:{self._etcd_port}"
        self._spawn(
            "etcd",
            [
                f"--data-dir={self.folder}/etcd",
                f"--listen-client-urls={clients}",
                f"--advertise-client-urls={clients}",
                f"--listen-peer-urls={peers}",
                f"--initial-advertise-peer-urls={peers}",
                f"--initial-cluster=default={peers}",
                "--unsafe-no-fsync",
                "--log-level=warn",
            ],
        )

    def _api_server_flags(self) -> list[str]:
        folder = self.folder
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={folder}/server.crt",
            f"--tls-private-key-file={folder}/server.key",
            f"--client-ca-file={folder}/ca.crt",
            f"--token-auth-file={folder}/tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder}/sa.key",
            f"--service-account-signing-key-file={folder}/sa.key",
            f"--audit-policy-file={folder}/audit-policy.yaml",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-mode=blocking",
            # Aggregated APIs, straight at their endpoints: there is no kube-proxy.
            "--enable-aggregator-routing=true",
            f"--proxy-client-cert-file={folder}/client.crt",
            f"--proxy-client-key-file={folder}/client.key",
            "--allow-privileged=true",
            "--profiling=false",
            *self._extra_flags,
        ]

    def _write_keys(self) -> None:
        folder = self.folder
        write_certificates(folder)
        signing = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (folder / "sa.key").write_bytes(pem(signing))
        (folder / "audit-policy.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))
        self._tokens[ADMIN] = secrets.token_hex(16)
        (folder / "tokens.csv").write_text(f'{self._tokens[ADMIN]},{ADMIN},{ADMIN},"system:masters"\n')
        self._write_kubeconfig(self.kubeconfig, {"token": self._tokens[ADMIN]}, "default")

    def _write_kubeconfig(self, path: Path, user: dict[str, Any], namespace: str) -> None:
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "ca.crt")}
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "contexts": [{"name": "test", "context": context}],
            "users": [{"name": "test", "user": user}],
        }
        path.write_text(yaml.safe_dump(config))

    def _empty_config(self) -> Path:
        path = self.folder / "kwok.yaml"
        path.write_text("")
        return path
