"""Keys of manifests that have another name now: they are refused, and the refusal names what to write. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TTFT = "slo.ttft of the spec, as a duration such as 2s"
_ITL = "slo.itl of the spec, as a duration such as 50ms"
_ATTAINMENT = "slo.attainment of the spec"
_OPTION = "it is an option of `penstock planner run` only"

RENAMED_KEYS: Final[Mapping[str, str]] = {
    "spec.router.ttftSloSeconds": f"write {_TTFT}",
    "spec.planner.sla.ttftSeconds": f"write {_TTFT}",
    "spec.planner.sla.itlSeconds": f"write {_ITL}",
    "spec.planner.sla.attainment": f"write {_ATTAINMENT}",
    "spec.planner.objective.inTime": f"write {_ATTAINMENT}",
    "spec.planner.objective.itlSeconds": f"write {_ITL}",
    "spec.router.tiers.shedding.percentile": f"write {_ATTAINMENT}, such as 0.99 for 99",
    **{
        f"spec.router.tiers.slo.{tier}.{old}": f"write {new}, as a duration such as {example}"
        for tier in ("premium", "standard", "background")
        for old, new, example in (
            ("ttftSeconds", "ttft", "500ms"),
            ("tpotSeconds", "itl", "50ms"),
            ("endToEndSeconds", "endToEnd", "15s"),
        )
    },
    "spec.ttftSeconds": "write slo.ttft, as a duration such as 500ms",
    "spec.itlSeconds": "write slo.itl, as a duration such as 50ms",
    "spec.planner.namespace": f"remove it: the planner observes the graph's namespace; {_OPTION}",
    "spec.planner.environment": f"remove it: the planner scales where it was started; {_OPTION}",
    "spec.planner.servedModelName": f"write model.servedName of the spec; {_OPTION}",
    "spec.planner.logDir": f"remove it; {_OPTION}",
    "spec.planner.decodeEngineNumGpu": f"write gpusPerReplica of the decode service; {_OPTION}",
    "spec.planner.prefillEngineNumGpu": f"write gpusPerReplica of the prefill service; {_OPTION}",
}
"""What to do in place of a former key, by its path in a GraphDeployment or ProfileRequest."""
