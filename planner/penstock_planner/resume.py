"""Takes a planner up again where the ledger says it stood; `history` reads what that is."""

from __future__ import annotations

from penstock_core.errors import LedgerError
from penstock_core.logs import get_logger
from penstock_planner.history import ANCHORS, History, restore, without_asked
from penstock_planner.ledger import Ledger
from penstock_planner.standing import Standing

log = get_logger(__name__)


def resume(standing: Standing, ledger: Ledger, now_s: float) -> bool:
    """Fill a blank standing from the ledger; True if the interval under way goes on.

    Times of another timeline (another boot, another node) cannot be compared: then only the state is kept,
    and changes not known to be carried out are forgotten.
    """
    history = _read_history(ledger)
    if history is None:
        return False
    standing.state = history.state
    if history.timeline == standing.settings.timeline and history.newest_s <= now_s:
        return _continue(standing, history, now_s)
    for change in history.pending:
        standing.state = without_asked(standing.state, change.role)
    return False


def _read_history(ledger: Ledger) -> History | None:
    try:
        return restore(ledger.tail(ANCHORS))
    except (LedgerError, KeyError, TypeError, ValueError) as exc:
        aside = ledger.set_aside()
        log.error("ledger cannot be read: starting a new one", error=str(exc), kept_as=str(aside))  # noqa: TRY400 - the message says it all
        return None


def _continue(standing: Standing, history: History, now_s: float) -> bool:
    """Take the interval under way up again; False if it is long over and nothing is outstanding."""
    standing.origin_s = history.origin_s
    standing.pending = history.pending
    standing.blocked_s = history.blocked_s
    is_idle = standing.blocked_s is None and not standing.pending
    interval_s = standing.settings.config.adjustment_interval_s
    if is_idle and now_s >= history.start_s + 2 * interval_s:
        return False
    standing.grid = standing.grid_from(history.start_s)
    standing.slot = history.slot
    standing.pulls = list(history.pulls)
    return True
