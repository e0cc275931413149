"""The tiers of a live router: a request's tier and tenant by header, model name and key, and what its end says of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from prometheus_client.core import Metric

from penstock.api import Tier, TiersConfig
from penstock.core.errors import ConfigError
from penstock.router.admission import Admission, TierTurnedAway
from penstock.router.core.tiers import TierControl
from penstock.router.families import tier_families
from penstock.router.policy.slo_monitor import EndedRequest
from penstock.router.policy.tiers import PRIORITIES
from penstock.router.proxy.auth import KeySource, read_keys
from penstock.router.proxy.call import CompletionCall, TierIdentity
from penstock.router.proxy.completion import CompletionRequest, RequestRefused
from penstock.router.proxy.failures import QUEUE_TIMEOUT, SHED
from penstock.router.proxy.kv_transfer import encoded

TIER_KEYS: Final = KeySource("--tier-keys-file", "PENSTOCK_TIER_KEYS")


@dataclass(frozen=True, slots=True)
class TierKey:
    """What a key says of its requests.

    Attributes:
        tier: The highest one that they may ask for, and theirs where they ask for none.
        tenant: Whose they are.
    """

    tier: Tier
    tenant: str


class TierKeys:
    """Keys by their digests, so that the time of a look-up reveals nothing about a key."""

    def __init__(self, keys: Mapping[bytes, TierKey]) -> None:
        """Take the keys, which may be none."""
        self.keys: Final = frozenset(keys)
        self._by_digest = {_digest(key): value for key, value in keys.items()}

    def of(self, authorization: bytes | None) -> TierKey | None:
        """Return what the key of an Authorization header carries; None without one of these."""
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not self._by_digest:
            return None
        return self._by_digest.get(_digest(token.strip()))


def read_tier_keys(file: Path | None, environment: str | None) -> TierKeys:
    """Return the keys of a file or folder, one a line, and of a variable, comma-separated.

    Each is ``KEY TIER``, or ``KEY TIER TENANT``; a key without a tenant is one by itself.

    Args:
        file: File or folder; None: not given.
        environment: Value of the variable; None: not set.

    Raises:
        ConfigError: a file cannot be read, there is no key, or a line is not of this form; the message names no key.
    """
    return TierKeys(_parsed(read_keys(TIER_KEYS, file, environment)))


def _parsed(lines: Iterable[bytes]) -> dict[bytes, TierKey]:
    keys: dict[bytes, TierKey] = {}
    tiers = ", ".join(Tier)
    for line in sorted(lines):
        words = line.decode().split()
        if len(words) not in {2, 3} or words[1] not in set(Tier):
            shown = " ".join(("KEY", *words[1:]))[:80]
            raise ConfigError(
                f"{TIER_KEYS.flag}: {shown!r}: must be KEY TIER, or KEY TIER TENANT; tiers are {tiers}"
            )
        key = words[0].encode()
        if key in keys:
            raise ConfigError(
                f"{TIER_KEYS.flag}: a key is given twice, as {keys[key].tier} and {words[1]}; keep one"
            )
        keys[key] = TierKey(Tier(words[1]), words[2] if len(words) == 3 else f"key-{_digest(key)[:8]}")
    return keys


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


_SHOWN_CHARACTERS = 64
"""Of a client's value in a message."""


class TierAdmission:
    """Gives requests their tiers.

    Attributes:
        downgraded: Requests so far that asked for a higher tier than their key allows, by that tier.
        config: The graph's tiers section; it may be replaced while requests are under way.
        keys: API keys that carry a tier.
    """

    def __init__(self, config: TiersConfig, keys: TierKeys, *, model: str) -> None:
        """Take settings and keys."""
        self.config = config
        self.keys = keys
        self.downgraded = dict.fromkeys(Tier, 0)
        self._model = model

    def identify(self, headers: Mapping[bytes, bytes], model: object) -> TierIdentity:
        """Return a request's tier and tenant, and count a downgrade.

        A key's own tier, or the default one, is that of a request that asks for none or for more than it may.

        Raises:
            RequestRefused: 400, the header names no tier.
        """
        config = self.config
        key = self.keys.of(headers.get(b"authorization"))
        own = config.default if key is None else key.tier
        tenant = "" if key is None else key.tenant
        asked = self._asked(headers, model)
        if asked is None:
            return TierIdentity(own, tenant)
        highest = (
            own if key is not None or self.keys.keys else min(own, Tier.PREMIUM, key=PRIORITIES.__getitem__)
        )
        if PRIORITIES[asked] < PRIORITIES[highest]:
            self.downgraded[asked] += 1
            return TierIdentity(own, tenant, asked)
        return TierIdentity(asked, tenant)

    def _asked(self, headers: Mapping[bytes, bytes], model: object) -> Tier | None:
        sent = headers.get(self.config.header.lower().encode())
        if sent is None:
            return self.config.models.get(model) if isinstance(model, str) else None
        name = sent.decode("latin-1").strip().lower()
        try:
            return Tier(name)
        except ValueError:
            raise RequestRefused(
                400,
                f"{self.config.header}: {name[:_SHOWN_CHARACTERS]!r} is no tier; send one of {', '.join(Tier)}, or "
                "leave the header out",
                code="unknown_tier",
            ) from None

    def for_worker(self, request: CompletionRequest, tier: Tier) -> CompletionRequest:
        """Return the request as workers get it: by the model's own name, with the tier's ``priority`` and no other.

        Raises:
            RequestRefused: 400, the body cannot be written again.
        """
        priority, body = PRIORITIES[tier], request.body
        changes: dict[str, Any] = {}
        if body.get("model") != self._model:
            changes["model"] = self._model
        if priority != body.get("priority", 0) or isinstance(body.get("priority"), bool):
            changes["priority"] = priority
        if not changes:
            return request
        changed = {**body, **changes}
        if body.keys().isdisjoint(changes):
            # The body is an object with at least a model, so its last byte is the brace to move.
            raw = request.raw.rstrip()[:-1] + b"," + orjson.dumps(changes)[1:]
        else:
            # Of a key that comes twice, not every reader takes the last.
            raw = encoded(changed)
        return request._replace(raw=raw, body=changed)


_COUNTED_BY_CORE = (QUEUE_TIMEOUT, SHED)
_OVERLOADED = (429, 503)


class LiveTiers:
    """Ties admission, the core's counters and the metrics page.

    Attributes:
        admission: Gives requests their tiers.
    """

    def __init__(
        self, admission: TierAdmission, control: TierControl, workers: Admission, now_s: Callable[[], float]
    ) -> None:
        """Connect the parts; ``now_s`` returns simulated seconds."""
        self.admission = admission
        self._control = control
        self._workers = workers
        self._core = workers.core
        self._now_s = now_s

    def ended(self, call: CompletionCall, status: int, e2e_s: float) -> None:
        """Record a request's end; one whose client left early, or was at fault, does not count for its tier."""
        if not (call.worker or call.prefill_worker):
            if status in _OVERLOADED and call.error not in _COUNTED_BY_CORE:
                self._workers.record_tier_event(call.tier, TierTurnedAway())
            return
        is_complete = status == 200 and call.error is None
        if not is_complete and (
            call.error in {None, "client_left", "shutdown"} or (status < 500 and status != 200)
        ):
            return
        ended = EndedRequest.after(call.ttft_s, e2e_s, call.output_tokens, is_failed=not is_complete)
        self._workers.record_tier_event(call.tier, ended)

    def configure(self, config: TiersConfig) -> None:
        """Take another tiers section from now on: header, names, shares, targets and shedding."""
        self.admission.config = config
        self._control.monitor.configure(config)
        for queue in self._core.queues.values():
            queue.set_tiers(config)

    def families(self) -> Iterator[Metric]:
        """Yield the metric families with the label ``tier``."""
        waiting = self._core.entry_queue.room.tiers
        yield from tier_families(
            self._control, self._now_s(), waiting=waiting, downgraded=self.admission.downgraded
        )
