"""When something that failed is asked again: after 1, 2, 4 ... 30 real seconds."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Real seconds without asking what failed, doubling. Chosen: what hangs costs its time-out once per pause
instead of once per pull, and one that is back is noticed within half a minute."""


@dataclass(slots=True)
class PullBackoff:
    """One source's or one page's failures in a row.

    Attributes:
        failures: In a row.
        retry_at_s: Real monotonic seconds before which it is not asked.
        why: The newest failure.
    """

    failures: int = 0
    retry_at_s: float = 0.0
    why: str = ""

    def is_pausing(self, now_s: float) -> bool:
        """Return whether it is not to be asked yet."""
        return now_s < self.retry_at_s

    def failed(self, why: str, now_s: float) -> None:
        """Count a failure and begin the next pause."""
        self.failures += 1
        self.retry_at_s = now_s + min(FIRST_PAUSE_S * 2 ** min(self.failures - 1, 16), LONGEST_PAUSE_S)
        self.why = why

    def succeeded(self) -> None:
        """Forget the failures."""
        self.failures, self.retry_at_s = 0, 0.0
