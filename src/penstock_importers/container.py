"""A container of vLLM, as llm-d and KServe write it: its flags, variables, GPUs and the rest of its pod."""

from __future__ import annotations

import shlex
from typing import Any, Final

from penstock.api.manifests.foreign import ManifestSource

_BY_RUNTIME: Final = "is set by the runtime"
_GPU: Final = "nvidia.com/gpu"

OWN_FLAGS: Final = frozenset({"--port", "--host", "--kv-transfer-config", "--kv_transfer_config"})
"""Flags of vLLM that the runtime gives by itself."""
OWN_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")
_SHELLS: Final = frozenset({"sh", "bash", "/bin/sh", "/bin/bash"})
_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe", "ports", "lifecycle")
_POD_KEYS: Final = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "serviceAccountName",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
)
_CONTAINER_KEYS: Final = ("imagePullPolicy", "securityContext", "volumeMounts")


def read_flags(
    source: ManifestSource, words: list[str], service: dict[str, Any], model: dict[str, Any]
) -> None:
    """Take what a graph says by keys out of vLLM's flags; the others become the service's arguments."""
    rest, place = list(words), 0
    kept: list[str] = service.get("args", [])
    while place < len(rest):
        flag, equals, value = rest[place].partition("=")
        has_next = not equals and place + 1 < len(rest) and not rest[place + 1].startswith("--")
        value = rest[place + 1] if has_next else value
        whole = rest[place : place + 1 + has_next]
        place += len(whole)
        if flag == "--max-model-len" and value.isdigit():
            model["contextTokens"] = int(value)
        elif flag == "--served-model-name":
            model["servedName"] = value
        elif flag == "--model":
            model.setdefault("name", value)
        elif flag == "--tensor-parallel-size" and value.isdigit():
            service["gpusPerReplica"] = max(int(value), service.get("gpusPerReplica", 1))
        elif flag in OWN_FLAGS:
            source.note(_BY_RUNTIME, " ".join(whole))
        else:
            kept += whole
    if kept:
        service["args"] = kept


def read_env(source: ManifestSource, service: dict[str, Any]) -> None:
    """Take the variables of a list, without those that the runtime sets."""
    kept = []
    for each in source.elements("env"):
        if each.peek("name") in OWN_VARIABLES:
            each.note(_BY_RUNTIME)
        else:
            kept.append(each.take())
    if kept:
        service["env"] = kept


def read_container(
    source: ManifestSource, service: dict[str, Any], model: dict[str, Any], *, more_args: str = ""
) -> None:
    """Fill a service from a container; ``more_args`` names a variable with further flags."""
    if image := source.take("image"):
        service["image"] = image
    source.taken.add((*source.base, "name"))
    words = _words(source)
    if words and not words[0].startswith("-"):
        model.setdefault("name", words.pop(0))
    read_env(source, service)
    _read_resources(source, service)
    read_flags(source.at("args"), words, service, model)
    read_flags(source.at("env"), _further_words(service, more_args), service, model)
    if env_from := source.take_list("envFrom"):
        service["envFrom"] = env_from
    for key in _PROBES:
        if source.peek(key) is not None:
            source.at(key).note(_BY_RUNTIME)
    _add_to_container(service, {key: value for key in _CONTAINER_KEYS if (value := source.take(key))})


def _words(source: ManifestSource) -> list[str]:
    """Return the words after ``vllm serve``; none, and a note, where only a shell knows them."""
    command = [str(each) for each in source.take_list("command")]
    words = [str(each) for each in source.take_list("args")]
    if {*command, *words[:1]} & _SHELLS or any("\n" in each for each in words):
        source.at("args").note("is a script of a shell; write vLLM's flags of it into args")
        return []
    if command and command[0] != "vllm":
        source.at("command").note("is replaced by vLLM's own command")
    return words[2:] if words[:2] == ["vllm", "serve"] else words


def _further_words(service: dict[str, Any], variable: str) -> list[str]:
    """Take the flags that a variable holds out of a service's environment."""
    env = service.get("env", [])
    found = [each for each in env if variable and each.get("name") == variable]
    if found:
        service["env"] = [each for each in env if each not in found]
    return [word for each in found for word in shlex.split(str(each.get("value", "")))]


def _read_resources(source: ManifestSource, service: dict[str, Any]) -> None:
    resources = {kind: dict(source.take_map("resources", kind)) for kind in ("limits", "requests")}
    gpus = [int(each.pop(_GPU, 0) or 0) for each in resources.values()]
    if max(gpus):
        service["gpusPerReplica"] = max(gpus)
    found = {kind: each for kind, each in resources.items() if each}
    _add_to_container(service, {"resources": found} if found else {})


def _add_to_container(service: dict[str, Any], fields: dict[str, Any]) -> None:
    if fields:
        pod = service.setdefault("podTemplate", {}).setdefault("spec", {})
        pod.setdefault("containers", [{"name": "main"}])[0].update(fields)


def read_pod(source: ManifestSource, service: dict[str, Any]) -> None:
    """Fill a service's pod template from the keys of a pod that a graph does not have itself."""
    found = {key: value for key in _POD_KEYS if (value := source.take(key))}
    if found:
        service.setdefault("podTemplate", {}).setdefault("spec", {}).update(found)
    grace = source.take("terminationGracePeriodSeconds")
    if isinstance(grace, int):
        service["terminationGracePeriodSeconds"] = grace


def read_parallelism(source: ManifestSource, service: dict[str, Any]) -> None:
    """Take tensor parallelism; other kinds are flags that a person chooses."""
    tensor = source.take("tensor")
    if isinstance(tensor, int):
        service["gpusPerReplica"] = max(tensor, service.get("gpusPerReplica", 1))
    for key in source.names():
        if key != "tensor" and source.peek(key) in (None, False, 1):
            source.take(key)
    source.note_keys("is not carried; write vLLM's flags into args and all its GPUs as gpusPerReplica")
