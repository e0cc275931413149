"""The rules of a ProfileRequest. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.api.profile_request import ProfileRequest, ProfileRequestSpec
from penstock.api.rule import Breach, Rule, unless
from penstock.kube.objects.pod_template import unknown_fields

MAX_REQUEST_NAME: Final = 52
"""The Job appends ``-profile``, and its name is a label's value of 63 characters on its pods; as for graphs."""


def _unknown_pod_keys(spec: ProfileRequestSpec) -> Iterator[Breach]:
    for each in unknown_fields(spec.pod_template):
        remedy = f"did you mean {each.meant}?" if each.meant else None
        yield Breach(values=(each.kind,), path=("podTemplate", *each.path), remedy=remedy)


def _long_name(request: ProfileRequest) -> Iterator[Breach]:
    name = request.metadata.name
    if len(name) > MAX_REQUEST_NAME:
        yield Breach((name, len(name)))


def _too_large(spec: ProfileRequestSpec) -> Iterator[Breach]:
    above = [size for size in spec.tensor_parallel if size > spec.max_gpus]
    if above:
        yield Breach((above[0], spec.max_gpus))


REQUEST_RULES: tuple[Rule[ProfileRequest], ...] = (
    Rule(
        path="metadata.name",
        must=f"a ProfileRequest's name has at most {MAX_REQUEST_NAME} characters",
        cel=f"size(self.metadata.name) <= {MAX_REQUEST_NAME}",
        find=_long_name,
        text="%s has %d characters, which is too long for its Job's",
        values=("self.metadata.name", "size(self.metadata.name)"),
        remedy=f"use at most {MAX_REQUEST_NAME}",
    ),
    Rule(
        path="spec",
        must="the spec of a ProfileRequest is immutable",
        cel="self.spec == oldSelf.spec",
        text="a request is measured once",
        remedy="delete it and apply it again, or give it another name",
    ),
)

REQUEST_SPEC_RULES: tuple[Rule[ProfileRequestSpec], ...] = (
    Rule(
        path="graph",
        must="a ProfileRequest has graph or template, not both",
        cel="has(self.graph) != has(self.template)",
        find=unless(lambda spec: (spec.graph is None) == bool(spec.template)),
        text="both or neither of graph and template",
        remedy="name a GraphDeployment of the namespace, or write the specification of one",
    ),
    Rule(
        path="tensorParallel",
        must="tensorParallel is at most maxGpus",
        cel="!has(self.tensorParallel) || self.tensorParallel.all(n, n <= self.maxGpus)",
        find=_too_large,
        text="%d exceeds maxGpus %d",
        values=("self.tensorParallel.filter(n, n > self.maxGpus)[0]", "self.maxGpus"),
        remedy="leave the size out or raise maxGpus",
    ),
    Rule(
        path="podTemplate",
        must="podTemplate has only keys of Kubernetes' PodTemplateSpec",
        cel=None,
        find=_unknown_pod_keys,
        text="unknown key of Kubernetes' %s",
        remedy="remove it",
    ),
)
