"""The manifest's reference as Markdown, written from the models themselves.

``python -m penstock.api.manifests.reference > docs/manifest.md`` renews the document; a test compares the two.
"""

from __future__ import annotations

import json
import sys
from enum import Enum
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.api.base import SpecModel
from penstock.api.fields import ANY_NAME, FieldEntry, is_duration, sections, walk
from penstock.api.gpu_pool import ClusterGpuPool, GpuPool
from penstock.api.graph import GraphDeployment, ScalingAdapter
from penstock.api.profile_request import ProfileRequest
from penstock.api.rule import Rule
from penstock.core.durations import duration_text

_INTRODUCTION = """\
# The manifest

For authors of a manifest: every key with type, bounds and default, and every rule between keys.

*Written from the models by `python -m penstock.api.manifests.reference`; a test keeps it current.*

A file holds one or more YAML documents of kind `GraphDeployment`, `ScalingAdapter`, `ProfileRequest`, `GpuPool` or
`ClusterGpuPool` (`apiVersion: penstock.dev/v1alpha1`). Check it with `penstock validate FILE`, and see the processes that
it becomes with `penstock render FILE`, or its Kubernetes objects with `penstock render FILE --kubernetes`.
Unknown keys are refused; scalars are not coerced (`"8"` is text).
Durations are text as in Kubernetes: `500ms`, `2s`, `10m`, `1h30m`; a number without a unit is refused.
Durations and seconds are simulated (see [glossary](glossary.md)): `--speed 20` makes twenty of them pass in a real one, except where the key
says real. `NAME` stands for a name that you choose, `[]` for each item of a list; a default of `required`
means that the key has no default.

Samples: [manifests/samples](../manifests/samples).
"""

_RULES = """\
## Rules

Broken rules are reported all at once, each with file, line, key, bound and remedy.

{table}

Immutable keys are compared with what the cluster holds, so an API server alone refuses their change. A graph's name
is immutable too: another name is another graph.

`penstock validate` also prints warnings: settings that are valid, but that need a package which is not installed here, or
that the planner's mode does not decide by.
"""

_RUNTIMES = """\
## Runtimes

`args` come last, so they override what the runtime writes; they and `env` may use `{port}`. A service's
`env` wins over the graph's, and both over the runtime's own. `CUDA_VISIBLE_DEVICES` is set by the backend.
On the local backend `envFrom` and `valueFrom` name objects that only a cluster has.

| Runtime | Worker | Router | Seen running |
|---|---|---|---|
| `simulated` | `penstock engine serve` | `penstock router serve` | yes |
| `vllm` | `vllm serve` with the NIXL connector | `penstock router serve` | vLLM 0.32.0 on a CPU, locally and on kind, no GPU: see vllm.md |
| `dynamo` | `python -m dynamo.vllm`, or `dynamo.mocker` | `python -m dynamo.frontend` | Dynamo 1.6.1's frontend and mocker, locally, and 1.6.0's on kind; its vLLM workers not: see dynamo.md |

Tensor parallelism is `gpusPerReplica` ÷ `nodesPerReplica`, pipeline parallelism `nodesPerReplica`. The
addresses that a multi-node replica's nodes need of each other are added in a cluster; the local backend
runs one machine. Prefill workers are KV producers and decode workers consumers, under the lease of
`spec.lease`; `router.tiers.enabled` adds `--scheduling-policy priority`. Only simulated workers and
Dynamo's mocker follow `--speed`.
"""

_SECTIONS: tuple[tuple[str, type[SpecModel]], ...] = (
    ("GraphDeployment", GraphDeployment),
    ("ScalingAdapter", ScalingAdapter),
    ("ProfileRequest", ProfileRequest),
    ("GpuPool", GpuPool),
    ("ClusterGpuPool", ClusterGpuPool),
)


def markdown() -> str:
    """Return the complete document."""
    tables = [f"## {title}\n\n{_table(model)}" for title, model in _SECTIONS]
    return "\n".join([_INTRODUCTION, _RULES.format(table=_rule_table()), _RUNTIMES, *tables])


def _rule_table() -> str:
    places: dict[Rule[Any], list[str]] = {}
    for _, kind in _SECTIONS:
        for below, section in sections(kind):
            for rule in section.rules:
                places.setdefault(rule, []).append(_blamed(rule, below))
    rows = ["| Rule | Key that is blamed |", "|---|---|"]
    rows += [
        f"| {rule.must} | {', '.join(f'`{path}`' for path in paths)} |" for rule, paths in places.items()
    ]
    return "\n".join(rows)


def _blamed(rule: Rule[Any], below: str) -> str:
    if rule.at:
        return rule.at.replace("%s", ANY_NAME)
    return f"{below}{rule.key or rule.path}".rstrip(".")


def _table(model: type[SpecModel]) -> str:
    rows = ["| Key | Type and bounds | Default | Meaning |", "|---|---|---|---|"]
    rows += [_row(entry) for entry in walk(model)]
    return "\n".join(rows) + "\n"


def _row(entry: FieldEntry) -> str:
    description = (entry.info.description or "").replace("|", "\\|")
    return f"| `{entry.path}` | {entry.shape} | {default_text(entry.info)} | {description} |"


def default_text(info: FieldInfo) -> str:
    """Return a field's default as a manifest would write it."""
    default: Any = info.default
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, SpecModel):
        return "its keys' own"
    if isinstance(default, Enum):
        return f"`{default.value}`"
    if default in ((), {}):
        return "empty"
    if is_duration(info) and default is not None:
        return f"`{duration_text(default)}`"
    return f"`{json.dumps(default)}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
