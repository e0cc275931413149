"""A fixed list of workers, from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.api import WORKER_ROLES, Role
from penstock.core.errors import ConfigError
from penstock.router.core.worker_spec import WorkerSpec


def parse_static_workers(values: Sequence[str]) -> tuple[WorkerSpec, ...]:
    """Read a fixed fleet from ``role=url`` arguments; names become ``role-0``, ``role-1``...

    Raises:
        ConfigError: a value is not ``role=http://host:port``.
    """
    found: list[WorkerSpec] = []
    for value in values:
        role_text, _, url = value.partition("=")
        if role_text not in WORKER_ROLES or not url.startswith("http://") or len(url) <= len("http://"):
            roles = ", ".join(WORKER_ROLES)
            raise ConfigError(f"--worker: {value!r}: write role=http://host:port with a role of {roles}")
        role = Role(role_text)
        number = sum(each.role is role for each in found)
        found.append(WorkerSpec(name=f"{role}-{number}", role=role, url=url.rstrip("/")))
    return tuple(found)
