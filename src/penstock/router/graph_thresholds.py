"""The thresholds above which workers are busy, of which all routers of a graph have the same.

They begin as the graph's file says. What is set at one router, or follows a change of the file, has a higher version, is
told with the router's load (`peers`), and replaces what is older elsewhere; of two changes that were made at once every
router takes the same one. So they last as long as one router of the graph does.
"""

from __future__ import annotations

from penstock.router.admission import Admission
from penstock.router.peer_load import ThresholdState
from penstock.router.policy.busy import BusyThresholds


class GraphThresholds:
    """One router's copy.

    Attributes:
        state: What holds here.
    """

    def __init__(self, admission: Admission) -> None:
        """Begin with what the admission was made with, as the graph's file says."""
        self._admission = admission
        core = admission.core
        file = core.busy[core.entry].thresholds
        self.state = ThresholdState(0, file, file)

    @property
    def now(self) -> BusyThresholds:
        """What holds."""
        return self.state.now

    def set(self, thresholds: BusyThresholds) -> None:
        """Set what somebody asked this router for."""
        self._take(ThresholdState(self.state.version + 1, self.state.file, thresholds))

    def file_changed(self, thresholds: BusyThresholds) -> None:
        """Set what the graph's file says now, unless another router has read it before and told."""
        if thresholds != self.state.file:
            self._take(ThresholdState(self.state.version + 1, thresholds, thresholds))

    def heard(self, state: ThresholdState) -> None:
        """Take what another router has, if it is newer."""
        if state.is_after(self.state):
            self._take(state)

    def _take(self, state: ThresholdState) -> None:
        self.state = state
        self._admission.set_thresholds(state.now)
