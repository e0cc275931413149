"""Keys that carry a tier and a tenant: how they are written, read and looked up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.router.proxy.auth import KeySource, read_keys

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
    """Keys by their digests, so that the time of a look-up tells nothing about a key."""

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
