"""The manifest that benchmarks give to real routers and workers: simulated pools behind one router."""

from __future__ import annotations

from collections.abc import Mapping

PROFILE = "a100-llama-8b-bf16-tp1"
_GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: {name}}}
spec:
  model: {{name: {model}, servedName: {model}, contextTokens: 131072}}
  runtime: simulated
  services:
    frontend: {{role: router}}
{workers}
  engine: {{profile: {profile}}}
  planner: {{enabled: false}}
"""


def manifest(
    name: str,
    model: str,
    pools: Mapping[str, int],
    *,
    policy: str | None = None,
    profile: str = PROFILE,
) -> str:
    """Return a graph with a service per pool, called after its role, and no planner.

    Args:
        name: Graph's name.
        model: Model's name, served under the same.
        pools: Replicas by role.
        policy: Routing policy; None: the default.
        profile: Engine's profile.
    """
    workers = "\n".join(f"    {role}: {{role: {role}, replicas: {count}}}" for role, count in pools.items())
    text = _GRAPH.format(name=name, model=model, workers=workers, profile=profile)
    return text + (f"  router: {{policy: {policy}}}\n" if policy is not None else "")
