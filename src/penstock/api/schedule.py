"""What people know of the week beforehand: entries that bound the planner's roles while a period of the calendar holds. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from penstock.api.base import WHOLE, DnsLabel, Integer, SpecModel, entry
from penstock.api.enums import WORKER_ROLES, Role
from penstock.api.rule import Rule
from penstock.core.cron import FIELDS_PATTERN, Recurring, check, check_time_zone
from penstock.core.errors import ConfigError


def _checked(refuse: Callable[[str], None]) -> AfterValidator:
    def checked(value: str) -> str:
        try:
            refuse(value)
        except ConfigError as exc:
            raise PydanticCustomError("schedule", "{wrong}", {"wrong": str(exc)}) from exc
        return value

    return AfterValidator(checked)


CronText = Annotated[str, StringConstraints(pattern=FIELDS_PATTERN, max_length=100), _checked(check)]
TimeZone = Annotated[str, StringConstraints(min_length=1, max_length=64), _checked(check_time_zone)]
Bound = Annotated[int, Field(strict=True, ge=0, le=1000)]


class ScheduledRole(SpecModel):
    """Bounds of one role while the entry holds."""

    min_replicas: Bound | None = entry(None, "Minimum replicas; null: as at other times.")
    max_replicas: Bound | None = entry(None, "Maximum replicas; null: as at other times.")
    gpus: Annotated[int, Field(strict=True, ge=1, le=100_000)] | None = entry(
        None, "GPUs that the role holds, in whole replicas, no fewer and no more; null: as the other two say."
    )

    rules = (
        Rule(
            path="gpus",
            must="gpus is set without minReplicas and maxReplicas",
            cel="!has(self.gpus) || (!has(self.minReplicas) && !has(self.maxReplicas))",
            holds=lambda r: r.gpus is None or (r.min_replicas is None and r.max_replicas is None),
            text="%d says how many there are, in addition to minReplicas or maxReplicas",
            values=("self.gpus",),
            remedy="keep one or the other",
        ),
        Rule(
            path="minReplicas",
            must="minReplicas is at most maxReplicas",
            cel="!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            holds=lambda r: (
                r.min_replicas is None or r.max_replicas is None or r.min_replicas <= r.max_replicas
            ),
            text="%d exceeds maxReplicas %d",
            values=("self.minReplicas", "self.maxReplicas"),
            remedy="lower it",
        ),
    )

    def floor(self, gpus: int) -> int | None:
        """Return the fewest replicas, of ``gpus`` GPUs each; None: none said."""
        return self.min_replicas if self.gpus is None else self.gpus // gpus

    def ceiling(self, gpus: int) -> int | None:
        """Return the most replicas, of ``gpus`` GPUs each; None: none said."""
        return self.max_replicas if self.gpus is None else self.gpus // gpus


class ScheduleEntry(SpecModel):
    """One recurring period of the calendar, in real time, and its bounds."""

    name: DnsLabel = Field(description="Names the entry in decisions.")
    cron: CronText = Field(
        description="When it begins: minute, hour, day of month, month and day of week, as `0 8 * * 1-5`."
    )
    time_zone: TimeZone = entry("UTC", "IANA time zone of `cron`.")
    duration_seconds: Annotated[Integer, Field(ge=60, le=604_800), WHOLE] = Field(
        description="Duration for which the entry holds; real seconds."
    )
    prefill: ScheduledRole | None = entry(None, "Bounds of prefill; null: none.")
    decode: ScheduledRole | None = entry(None, "Bounds of decode; null: none.")
    aggregated: ScheduledRole | None = entry(None, "Bounds of aggregated workers; null: none.")

    rules = (
        Rule(
            must="an entry bounds a role",
            cel="has(self.prefill) || has(self.decode) || has(self.aggregated)",
            holds=lambda e: bool(e.bounds),
            text="%s bounds no role",
            values=("self.name",),
            remedy="give prefill, decode or aggregated with minReplicas, maxReplicas or gpus",
        ),
    )

    @property
    def period(self) -> Recurring:
        """Return when the entry holds."""
        return Recurring(self.cron, self.time_zone, self.duration_seconds)

    @property
    def bounds(self) -> dict[Role, ScheduledRole]:
        """Return the bounds by role."""
        found = {role: getattr(self, role.value) for role in WORKER_ROLES}
        return {role: each for role, each in found.items() if each is not None}
