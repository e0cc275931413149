"""The live router's tiers: its admission, and what the end of a request says of its tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from penstock.api import TiersConfig
from penstock.router.admission import Admission, TierTurnedAway
from penstock.router.core.tier_control import TierControl
from penstock.router.policy.slo_monitor import EndedRequest
from penstock.router.policy.tiers import tier_settings
from penstock.router.proxy.call import CompletionCall
from penstock.router.proxy.failures import QUEUE_TIMEOUT, SHED
from penstock.router.proxy.tier_admission import TierAdmission
from penstock.router.tier_metrics import TierGauges, tier_families

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
        """Tie the parts; ``now_s`` tells simulated seconds."""
        self.admission = admission
        self._control = control
        self._workers = workers
        self._core = workers.core
        self._now_s = now_s

    def ended(self, call: CompletionCall, status: int, e2e_s: float) -> None:
        """Take note of a request's end; one whose client left early, or was at fault, says nothing of its tier."""
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
        settings = tier_settings(config)
        self.admission.config = config
        self._control.configure(settings, config.shedding)
        for queue in self._core.queues.values():
            queue.set_tiers(settings)

    def families(self) -> Iterator[Metric]:
        """Yield the metric families with the label ``tier``."""
        waiting = self._core.entry_queue.room.tiers
        yield from tier_families(
            self._control, TierGauges(waiting, dict(self.admission.downgraded), self._now_s())
        )
