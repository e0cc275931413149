"""The thresholds above which workers are busy, of which all routers of a graph have the same.

They begin as the graph's file says. What is set at one router, or follows a change of the file, has a higher version, is
told with each sign of life (`picker.group`), and replaces what is older elsewhere; of two changes that were made at once every
router takes the same one. So they last as long as one router of the graph does.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from penstock.router.admission import Admission
from penstock.router.policy.busy import BusyThresholds
from penstock.router.proxy.busy_threshold import ThresholdError, checked

ToldThresholds = tuple[int, list[int | float | None], list[int | float | None]]
"""A state as routers tell it: its version, the file's thresholds and those that hold."""


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """What all routers agree on.

    Attributes:
        version: Counts the changes, >= 0; 0: none was made.
        file: What the graph's file said at the last change.
        now: What holds.
    """

    version: int
    file: BusyThresholds
    now: BusyThresholds

    def told(self) -> ToldThresholds:
        """Return what other routers are told."""
        return self.version, list(astuple(self.file)), list(astuple(self.now))


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

    def told(self) -> ToldThresholds | None:
        """Return what other routers are told; None: nothing was changed."""
        return self.state.told() if self.state.version else None

    def heard(self, told: ToldThresholds) -> None:
        """Take what another router has, if it is newer; what is out of range is not taken."""
        version, file, now = told
        own = self.state.told()
        if (version, str(file), str(now)) <= (own[0], str(own[1]), str(own[2])):
            return
        try:
            self._take(ThresholdState(version, checked(file), checked(now)))
        except ThresholdError:
            return

    def _take(self, state: ThresholdState) -> None:
        self.state = state
        self._admission.set_thresholds(state.now)
