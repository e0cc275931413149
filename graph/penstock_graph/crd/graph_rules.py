"""Rules that relate several services of a graph to each other, in CEL; the models' are in `penstock_graph.rules`.

Two habits of the API server shape them. It takes the text of a number for boundlessly long, so a message is
one ``format`` with nothing appended. And its cost grows with the services' bound, 25, for each loop in a loop.
"""

from __future__ import annotations

from penstock_core.simulated_tokens import SIMULATED
from penstock_graph.crd.rule import Rule
from penstock_graph.models.base import DNS_LABEL_PATTERN
from penstock_graph.models.enums import WORKER_ROLES, Role
from penstock_graph.rules import DYNAMO_POLICIES, MAX_CHILD_NAME, PLANNER_SERVICE

_LABEL_REMEDY = (
    "use at most 63 lower-case letters, digits and hyphens, beginning and ending with a letter or digit"
)


_ROLES = "[" + ", ".join(f"'{role}'" for role in WORKER_ROLES) + "]"
_WORKERS = f"{_ROLES}.map(r, self.services.filter(k, self.services[k].role == r))"
_FLOOR = (
    "(!has(self.services[k].scaling) ? self.services[k].replicas * self.services[k].gpusPerReplica : "
    "[self.services[k].gpusPerReplica > 0 ? (self.planner.minGpuBudget + self.services[k].gpusPerReplica - 1) / "
    "self.services[k].gpusPerReplica : 0].map(n, n > self.services[k].scaling.minReplicas ? n : self.services[k].scaling.minReplicas)[0]"
    " * self.services[k].gpusPerReplica)"
)
_START = "self.services[k].replicas * self.services[k].gpusPerReplica"


def _sum(gpus: str) -> str:
    return f"self.services.filter(k, self.services[k].role != 'router').map(k, {gpus}).sum()"


def _named(role: str) -> str:
    """CEL for the name of the only service of a role; an error if there is none."""
    return f"self.services.filter(k, self.services[k].role == '{role}')[0]"


def _sum_message(bound: str, gpus: str, remedy: str) -> str:
    """CEL text such as ``5 GPUs are fewer than …: prefill 2 + decode 4 = 6; …``.

    One ``format`` and nothing appended to it: the API server takes the length of a number's text as unbounded.
    """
    values = {role: f"{_named(role)}, [{_named(role)}].map(k, {gpus})[0]" for role in WORKER_ROLES}
    budget, total = "self.planner.maxGpuBudget", _sum(gpus)
    return (
        f"{_count(Role.AGGREGATED)} ? '%d {bound}: %s %d = %d; {remedy}'"
        f".format([{budget}, {values[Role.AGGREGATED]}, {total}]) : '%d {bound}: %s %d + %s %d = %d; {remedy}'"
        f".format([{budget}, {values[Role.PREFILL]}, {values[Role.DECODE]}, {total}])"
    )


def _count(role: str) -> str:
    return f"self.services.exists(k, self.services[k].role == '{role}')"


GRAPH_RULES = (
    Rule(
        rule=f"self.metadata.name.matches('{DNS_LABEL_PATTERN}')",
        message=f"'%s is not a DNS label; {_LABEL_REMEDY}'.format([self.metadata.name])",
        short=f"not a DNS label; {_LABEL_REMEDY}",
        field=".metadata.name",
    ),
    Rule(
        rule=f"self.spec.services.all(k, size(self.metadata.name) + size(k) < {MAX_CHILD_NAME})",
        message=(
            f"[self.spec.services.filter(k, size(self.metadata.name) + size(k) >= {MAX_CHILD_NAME})[0]].map(k, "
            f"'spec.services.%s: %s-%s has %d characters, at most {MAX_CHILD_NAME} fit a child\\'s name; shorten the "
            "graph\\'s or the service\\'s name'.format([k, self.metadata.name, k, "
            "size(self.metadata.name) + size(k) + 1]))[0]"
        ),
        short=f"GRAPH-SERVICE has more than {MAX_CHILD_NAME} characters; shorten the graph's or the service's name",
        field=".spec.services",
    ),
)

_ROLE_RULES = (
    Rule(
        rule=f"{_WORKERS}.all(names, size(names) <= 1)",
        message=(
            f"{_WORKERS}.filter(names, size(names) > 1).map(names, 'spec.services.%s.role and "
            "spec.services.%s.role are both %s; keep one service per worker role'"
            ".format([names[0], names[1], self.services[names[0]].role]))[0]"
        ),
        short="several services have one worker role; keep one service per worker role",
        field=".services",
    ),
    Rule(
        rule=f"!{_count(Role.AGGREGATED)} || !({_count(Role.PREFILL)} || {_count(Role.DECODE)})",
        message="'aggregated workers stand beside prefill or decode; keep either kind'",
        short="aggregated workers stand beside prefill or decode; keep either kind",
        field=".services",
    ),
    Rule(
        rule=f"{_count(Role.AGGREGATED)} || ({_count(Role.PREFILL)} && {_count(Role.DECODE)})",
        message=(
            "'no %s service; declare prefill and decode, or one aggregated service'"
            f".format([{_count(Role.DECODE)} ? 'prefill' : {_count(Role.PREFILL)} ? 'decode' : 'prefill and decode'])"
        ),
        short="workers are missing; declare prefill and decode, or one aggregated service",
        field=".services",
    ),
)

_NAME_RULES = (
    Rule(
        rule=f"!('{PLANNER_SERVICE}' in self.services)",
        message=f"'spec.services.{PLANNER_SERVICE}: the planner\\'s process has this name; rename the service'",
        short="the planner's process has this name; rename the service",
        field=".services",
    ),
    *(
        Rule(
            rule=f"{guard}self.{key}.all(k, size(k) <= 63 && k.matches('{DNS_LABEL_PATTERN}'))",
            message=(
                f"'spec.{key}.%s: not a DNS label; {_LABEL_REMEDY}'"
                f".format([self.{key}.filter(k, size(k) > 63 || !k.matches('{DNS_LABEL_PATTERN}'))[0]])"
            ),
            short=f"a name is not a DNS label; {_LABEL_REMEDY}",
            field=f".{key}",
        )
        for key, guard in (("services", ""), ("nodePools", "!has(self.nodePools) || "))
    ),
    Rule(
        rule=(
            "self.services.all(k, !has(self.services[k].nodePool) || "
            "(has(self.nodePools) && self.services[k].nodePool in self.nodePools))"
        ),
        message=(
            "[self.services.filter(k, has(self.services[k].nodePool) && "
            "!(has(self.nodePools) && self.services[k].nodePool in self.nodePools))[0]].map(k, "
            "'spec.services.%s.nodePool: \"%s\" is not in nodePools %s; declare it or choose a declared one'"
            ".format([k, self.services[k].nodePool, has(self.nodePools) ? self.nodePools.map(p, p) : []]))[0]"
        ),
        short="a nodePool is not in nodePools; declare it or choose a declared one",
        field=".services",
    ),
)


def _engine_gpus(key: str, roles: str) -> Rule:
    judged = f"self.services[k].role in {roles} && self.services[k].gpusPerReplica != self.planner.{key}"
    return Rule(
        rule=f"!has(self.planner.{key}) || !self.services.exists(k, {judged})",
        message=(
            f"[self.services.filter(k, {judged})[0]].map(k, '%d contradicts services.%s.gpusPerReplica %d; "
            f"drop {key} or make them equal'.format([self.planner.{key}, k, self.services[k].gpusPerReplica]))[0]"
        ),
        short=f"{key} contradicts gpusPerReplica; drop it or make them equal",
        field=f".planner.{key}",
    )


_NO_BUDGET = "!self.planner.enabled || !has(self.planner.maxGpuBudget)"

_BUDGET_RULES = (
    _engine_gpus("prefillEngineNumGpu", "['prefill']"),
    _engine_gpus("decodeEngineNumGpu", "['decode', 'aggregated']"),
    Rule(
        rule=f"{_NO_BUDGET} || {_sum(_FLOOR)} <= self.planner.maxGpuBudget",
        message=_sum_message(
            "GPUs are fewer than the floors need",
            _FLOOR,
            "raise it, or lower minReplicas, gpusPerReplica or minGpuBudget",
        ),
        short="fewer GPUs than the floors need; raise it, or lower minReplicas, gpusPerReplica or minGpuBudget",
        field=".planner.maxGpuBudget",
    ),
    Rule(
        rule=f"{_NO_BUDGET} || {_sum(_START)} <= self.planner.maxGpuBudget",
        message=_sum_message(
            "GPUs are fewer than the graph starts with", _START, "raise it or lower replicas"
        ),
        short="fewer GPUs than the graph starts with; raise it or lower replicas",
        field=".planner.maxGpuBudget",
    ),
)

_KNOWN_POLICIES = ", ".join(DYNAMO_POLICIES)
_RUNTIME_RULES = (
    Rule(
        rule="!self.engine.mocker || self.runtime == 'dynamo'",
        message=(
            "'true, but runtime %s has no mocker; set runtime: dynamo or remove it'.format([self.runtime])"
        ),
        short="this runtime has no mocker; set runtime: dynamo or remove it",
        field=".engine.mocker",
    ),
    Rule(
        rule="!has(self.engine.requestLimit) || self.runtime == 'dynamo'",
        message=(
            "'%d, but workers of runtime %s refuse nothing by number; remove it and bound the load with "
            "router.prefillQueue and engine.maxRunningRequests'.format([self.engine.requestLimit, self.runtime])"
        ),
        short="workers of this runtime refuse nothing by number; remove it",
        field=".engine.requestLimit",
    ),
    Rule(
        rule=(
            "self.runtime != 'dynamo' || self.router.policy in ["
            + ", ".join(f"'{policy}'" for policy in DYNAMO_POLICIES)
            + "]"
        ),
        message=(
            "'%s is not known to Dynamo\\'s frontend, which routes here; "
            f"choose {_KNOWN_POLICIES}'.format([self.router.policy])"
        ),
        short=f"not known to Dynamo's frontend, which routes here; choose {_KNOWN_POLICIES}",
        field=".router.policy",
    ),
    Rule(
        rule=(
            f"!has(self.router.tokenizer) || self.router.tokenizer != '{SIMULATED}' || self.runtime == 'simulated'"
        ),
        message=(
            f"'{SIMULATED}, but workers of runtime %s have their model\\'s; give its tokenizer.json'"
            ".format([self.runtime])"
        ),
        short="workers of this runtime have their model's tokenizer; give its tokenizer.json",
        field=".router.tokenizer",
    ),
    Rule(
        rule=(
            "self.runtime != 'simulated' || !has(self.router.kvEventsPort) || !has(self.router.tokenizer) || "
            f"self.router.tokenizer == '{SIMULATED}'"
        ),
        message=(
            "'%s, but the events of simulated workers name tokens of their own; "
            f"write {SIMULATED}, or remove kvEventsPort'.format([self.router.tokenizer])"
        ),
        short=f"the events of simulated workers name tokens of their own; write {SIMULATED}",
        field=".router.tokenizer",
    ),
)

SPEC_RULES = (*_ROLE_RULES, *_NAME_RULES, *_BUDGET_RULES, *_RUNTIME_RULES)
"""Rules of ``spec``; `GRAPH_RULES` are those of the whole object."""
