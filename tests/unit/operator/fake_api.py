"""An API server in memory, as much of one as the operator needs; it can refuse, fail or kill at any write.

Its apply merges maps and replaces lists, which is simpler than Kubernetes'; what depends on the difference is
tested against a real API server.
"""

from __future__ import annotations

import asyncio
import copy
import random
from contextlib import asynccontextmanager

import orjson

from penstock.core.errors import ConflictError, InvalidObjectError, NotFoundError
from penstock.kube.client import Listing
from penstock.kube.kinds import kind_of

_STALE = "422: the server rejected our request due to an error in our request"
"""What a JSON patch is answered whose test fails, or whose path is absent."""


class Crash(BaseException):
    """The process is killed here."""


class FakeApi:
    """Objects by kind, namespace and name; a log of writes; a watch that tells at once."""

    def __init__(self):
        self.rng = random.Random(1)
        self.namespace = "ns"
        self.objects = {}
        self.writes = []
        self.version = 0
        self.fault = None
        self.served = {}
        self._watchers = []

    def write(self, verb, obj):
        """Log a write and let the fault have its say; return what to do after it is stored."""
        metadata = obj["metadata"]
        self.writes.append((verb, obj["kind"], metadata["name"]))
        return self.fault(len(self.writes), self.writes[-1]) if self.fault is not None else None

    def stored(self, obj, what):
        """Give an object its version and tell the watchers."""
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.tell(obj, what)
        return copy.deepcopy(obj)

    def tell(self, obj, what):
        """Send an event to the watches of the object's kind."""
        line = orjson.dumps({"type": what, "object": obj}) + b"\n"
        for kind, queue in self._watchers:
            if kind == obj["kind"]:
                queue.put_nowait(line)

    def at(self, kind, name, namespace="ns"):
        """Return a stored object."""
        found = self.objects.get((kind, namespace, name))
        if found is None:
            raise NotFoundError(f"404: {kind} {name}")
        return found

    async def get(self, kind, name, *, namespace=None):
        """Return a copy."""
        return copy.deepcopy(self.at(kind.kind, name, namespace))

    async def raw_get(self, path):
        """Return the kinds that are served below a path; by default there are no further groups."""
        if path not in self.served:
            raise NotFoundError(path)
        return {"resources": [{"name": each} for each in self.served[path]]}

    async def create(self, obj, *, field_manager, dry_run=False):
        """Store a new object."""
        kind_of(obj)
        after = self.write("create", obj)
        metadata = obj["metadata"]
        identity = (obj["kind"], metadata["namespace"], metadata["name"])
        if identity in self.objects:
            raise ConflictError(f"409: {metadata['name']} already exists")
        made = copy.deepcopy(dict(obj))
        made["metadata"] |= {"uid": f"uid-{self.version}", "generation": 1}
        made["metadata"]["managedFields"] = [{"manager": field_manager, "operation": "Update"}]
        self.objects[identity] = made
        answer = self.stored(made, "ADDED")
        _after(after)
        return answer

    async def apply(self, obj, *, field_manager, subresource=None):
        """Merge an object, or its status."""
        after = self.write("status" if subresource else "apply", obj)
        live = self.at(obj["kind"], obj["metadata"]["name"], obj["metadata"]["namespace"])
        if subresource:
            live["status"] = copy.deepcopy(obj["status"])
        else:
            before = orjson.dumps(live.get("spec"))
            _merge(live, {key: each for key, each in obj.items() if key != "status"})
            live["metadata"]["generation"] += orjson.dumps(live.get("spec")) != before
            mine = {"manager": field_manager, "operation": "Apply"}
            if mine not in live["metadata"]["managedFields"]:
                live["metadata"]["managedFields"].append(mine)
        answer = self.stored(live, "MODIFIED")
        _after(after)
        return answer

    async def patch(self, kind, name, patch, *, namespace, subresource=None, field_manager):
        """Apply a merge patch, or the JSON patches that the operator sends."""
        about = {"kind": kind.kind, "metadata": {"name": name}}
        after = None if kind.kind == "Event" else self.write("patch", about)
        live = self.at(kind.kind, name, namespace)
        if isinstance(patch, dict):
            wanted = patch.get("metadata", {})
            for key in ("uid", "resourceVersion"):
                if key in wanted and wanted[key] != live["metadata"][key]:
                    raise ConflictError(f"409: Precondition failed: UID in precondition: {wanted[key]}")
            before = orjson.dumps(live.get("spec"))
            _merge(live, patch)
            live["metadata"]["generation"] += orjson.dumps(live.get("spec")) != before
        else:
            _json_patch(live, patch)
        metadata = live["metadata"]
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            del self.objects[kind.kind, namespace, name]
            answer = self.stored(live, "DELETED")
        else:
            answer = self.stored(live, "MODIFIED")
        _after(after)
        return answer

    async def delete(self, kind, name, *, namespace, uid=None, grace_s=None):
        """Remove an object, or mark it where finalizers hold it."""
        after = self.write("delete", {"kind": kind.kind, "metadata": {"name": name}})
        live = self.at(kind.kind, name, namespace)
        if uid is not None and live["metadata"]["uid"] != uid:
            raise ConflictError("409: uid")
        if live["metadata"].get("finalizers"):
            live["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.stored(live, "MODIFIED")
        else:
            del self.objects[kind.kind, namespace, name]
            self.stored(live, "DELETED")
        _after(after)

    async def read_pages(self, kind, *, namespace, selector, take, restart):
        """List the objects of a namespace; None lists all."""
        for (name, place, _), obj in list(self.objects.items()):
            if name == kind.kind and namespace in {None, place}:
                take(copy.deepcopy(obj))
        return str(self.version)

    async def list(self, kind, *, namespace, labels=None):
        """List, whatever the labels."""
        items = []
        version = await self.read_pages(
            kind, namespace=namespace, selector="", take=items.append, restart=None
        )
        return Listing(items, version)

    @asynccontextmanager
    async def watch(self, kind, *, namespace, params):
        """Tell what is stored from now on."""
        queue = asyncio.Queue()
        entry = (kind.kind, queue)
        self._watchers.append(entry)

        async def lines():
            while True:
                yield await queue.get()

        try:
            yield lines()
        finally:
            self._watchers.remove(entry)


def _after(what):
    if what is not None:
        raise what


def _merge(live, patch):
    for key, value in patch.items():
        if value is None:
            live.pop(key, None)
        elif isinstance(value, dict) and isinstance(live.get(key), dict):
            _merge(live[key], value)
        else:
            live[key] = copy.deepcopy(value)


def _json_patch(live, operations):
    for operation in operations:
        *parents, last = operation["path"].strip("/").split("/")
        target = live
        try:
            for part in parents:
                target = target[int(part)] if isinstance(target, list) else target[part]
            key = int(last) if isinstance(target, list) else last
            if operation["op"] == "test" and target[key] != operation["value"]:
                raise InvalidObjectError(_STALE)
        except (KeyError, IndexError) as exc:
            raise InvalidObjectError(_STALE) from exc
        if operation["op"] == "remove":
            del target[key]
        elif operation["op"] == "replace":
            target[key] = copy.deepcopy(operation["value"])
