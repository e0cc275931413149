"""Which tier and tenant a request has: by header, by the name under which the model is asked for, and by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from penstock.api import Tier, TiersConfig
from penstock.router.policy.tiers import PRIORITIES
from penstock.router.proxy.completion import CompletionRequest
from penstock.router.proxy.kv_transfer import encoded
from penstock.router.proxy.refusal import RequestRefused
from penstock.router.proxy.tier_keys import TierKeys

_SHOWN_CHARACTERS = 64
"""Of a client's value in a message."""


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """Who a request is.

    Attributes:
        tier: Its tier.
        tenant: Whose it is; empty: nobody's in particular.
        asked: The higher tier that it asked for without a key that allows it; None: it did not.
    """

    tier: Tier
    tenant: str = ""
    asked: Tier | None = None


class TierAdmission:
    """Gives requests their tiers.

    Attributes:
        downgraded: Requests so far that asked for a higher tier than their key allows, by that tier.
        config: The graph's tiers section; it may be replaced while requests are under way.
        keys: Those that carry a tier.
    """

    def __init__(self, config: TiersConfig, keys: TierKeys, *, model: str) -> None:
        """Take settings and keys.

        Args:
            config: The graph's tiers section.
            keys: Without any, clients may name every tier but system: what lets them in has checked.
            model: The name that workers know.
        """
        self.config = config
        self.keys = keys
        self.downgraded = dict.fromkeys(Tier, 0)
        self._model = model

    def identify(self, headers: Mapping[bytes, bytes], model: object) -> TierIdentity:
        """Return a request's tier and tenant, and count a downgrade.

        A key's own tier, or the default one, is that of a request that asks for none or for more than it may.

        Args:
            headers: The request's.
            model: The name that it asks for.

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
        return replace(request, raw=raw, body=changed)
