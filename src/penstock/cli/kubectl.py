"""kubectl and helm against one context and namespace, as a user would type them; each call is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from typing import Final

from penstock.cli.terminal import Terminal
from penstock.core.errors import ClusterError, ConfigError
from penstock.core.http.loop import ended_or_stopped

ANSWER_S: Final = 30.0
"""Real seconds that a question may take. Chosen: a cluster that takes longer needs a look first."""
_TERMINATE_S = 10.0
"""Real seconds that a stopped command gets to end. Chosen: helm marks its release as failed meanwhile."""


class StopSignal(Exception):  # noqa: N818 - the user asked for it, no error
    """A signal came while a command ran."""


async def current_context() -> str:
    """Return the kubeconfig's current context; refuse where there is none."""
    try:
        return (await _run(["kubectl", "config", "current-context"], limit_s=ANSWER_S, stop=None)).strip()
    except ClusterError as exc:
        raise ConfigError(
            "--kubernetes: the kubeconfig has no current context; name one by --context, or create a "
            "cluster: kind create cluster"
        ) from exc


class KubectlContext:
    """One context and namespace."""

    def __init__(self, context: str, namespace: str, console: Terminal) -> None:
        """Name them.

        Args:
            context: Of the kubeconfig; each command names it, for the current one may change meanwhile.
            namespace: Each command's.
            console: Where commands that change something, and what they print, are shown.
        """
        self.context, self.namespace, self.console = context, namespace, console

    def kubectl_words(self, *words: str) -> list[str]:
        """Return a command; what follows ``--`` stays at its end."""
        return ["kubectl", "--context", self.context, "--namespace", self.namespace, *words]

    async def kubectl(
        self,
        *words: str,
        limit_s: float = ANSWER_S,
        stop: asyncio.Event | None = None,
        is_quiet: bool = False,
    ) -> str:
        """Show and run kubectl, and return what it printed, which is shown too unless ``is_quiet``.

        Raises:
            ClusterError: it failed, or took longer than ``limit_s`` real seconds.
            StopSignal: ``stop`` was set before it ended.
        """
        return await self._show(self.kubectl_words(*words), limit_s, stop, is_quiet=is_quiet)

    async def helm(self, *words: str, limit_s: float = ANSWER_S, stop: asyncio.Event | None = None) -> str:
        """Show and run helm, as `kubectl` does."""
        command = ["helm", *words, "--kube-context", self.context, "--namespace", self.namespace]
        return await self._show(command, limit_s, stop, is_quiet=True)

    async def ask(self, *words: str) -> str:
        """Run kubectl unseen, for what only reads."""
        return await _run(self.kubectl_words(*words), limit_s=ANSWER_S, stop=None)

    def say(self, command: list[str]) -> None:
        """Show a command."""
        self.console.print(
            f"$ {shlex.join(command)}", style="bold", markup=False, highlight=False, soft_wrap=True
        )

    async def _show(
        self, command: list[str], limit_s: float, stop: asyncio.Event | None, *, is_quiet: bool
    ) -> str:
        self.say(command)
        printed = await _run(command, limit_s=limit_s, stop=stop)
        if printed.strip() and not is_quiet:
            self.console.print(printed.rstrip(), markup=False, highlight=False, soft_wrap=True)
        return printed


async def _run(command: list[str], *, limit_s: float, stop: asyncio.Event | None) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is this process's to answer
    )
    talk = asyncio.create_task(process.communicate())
    try:
        await ended_or_stopped(talk, stop or asyncio.Event(), timeout_s=limit_s)
    finally:
        is_over = talk.done()
        if not is_over:
            await _end(process, talk)
    name = shlex.join(command)
    if not is_over:
        if stop is not None and stop.is_set():
            raise StopSignal
        raise ClusterError(
            f"{name}: did not finish within {limit_s:g} s; check whether the cluster is up: kubectl "
            "cluster-info"
        )
    printed, complaint = talk.result()
    if process.returncode:
        said = complaint.decode(errors="replace").strip() or printed.decode(errors="replace").strip()
        raise ClusterError(f"{name}: {said or f'exit {process.returncode}'}")
    return printed.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process, talk: asyncio.Task[tuple[bytes, bytes]]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    await asyncio.wait({talk}, timeout=_TERMINATE_S)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
