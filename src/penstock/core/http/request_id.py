"""``x-request-id``: one name of a request at its client, the router and the workers, and in their logs."""

from __future__ import annotations

import itertools
import os
import re
from typing import Final

HEADER: Final = b"x-request-id"
_WELL_FORMED: Final = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
_PREFIX: Final = os.urandom(8).hex()
_NUMBERS: Final = itertools.count(1)


def well_formed(sent: bytes | None) -> bytes | None:
    """Return a request id that was sent, if it is one.

    Accepted: 1 to 128 of ``A-Z a-z 0-9 . _ : + / = -``; anything else could break logs or headers.
    """
    return sent if sent is not None and _WELL_FORMED.fullmatch(sent) else None


def request_id(sent: bytes | None) -> bytes:
    """Return the client's request id if it is one, else a new one."""
    return well_formed(sent) or f"{_PREFIX}-{next(_NUMBERS):x}".encode()
