"""Settings of one operator process. Precedence: flag > environment (``PENSTOCK_OPERATOR_…``) > default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from penstock.api.base import DNS_LABEL_PATTERN, OperatorClass
from penstock.api.runtimes import PENSTOCK_IMAGE
from penstock.core.errors import ConfigError, InvalidSpecError, ManifestProblem
from penstock.core.ports import EVERY_ADDRESS
from penstock.kube.objects.names import OPERATOR_CLASS
from penstock_operator.resources.accelerators import GPU_RESOURCES
from penstock_operator.resources.allowances import allowances_of, profiles_of

_Namespace = Annotated[str, Field(pattern=DNS_LABEL_PATTERN, max_length=63)]
_Seconds = Annotated[float, Field(gt=0)]


class OperatorSettings(BaseModel):
    """Options of `penstock operator run`; each field's description is its help text. All durations are wall-clock seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    namespace: _Namespace | None = Field(
        None, description="Namespace to watch; none: the service account's or the kubeconfig's."
    )
    all_namespaces: bool = Field(False, description="Watch every namespace; needs cluster-wide rights.")
    operator_class: OperatorClass = Field(
        OPERATOR_CLASS, description="Handle only graphs and requests with this spec.operatorClass."
    )
    leader_election: bool = Field(
        True,
        description="Be active only while holding the Lease (leader election); required if two operators can run.",
    )
    kubeconfig: str | None = Field(
        None, description="Kubeconfig file; none: in the cluster its service account, else KUBECONFIG."
    )
    context: str | None = Field(None, description="Context of the kubeconfig; none: its current one.")
    host: str = Field(
        EVERY_ADDRESS,
        description="Address of /metrics, /healthz and /readyz; :: is every address, of IPv6 and IPv4.",
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8080, description="Port of /metrics, /healthz and /readyz; 0: off."
    )
    penstock_image: Annotated[str, Field(min_length=1)] = Field(
        PENSTOCK_IMAGE, description="Image of routers and simulated workers whose graph names none."
    )
    pod_ip: str = Field(
        "",
        description="The operator's own address; engines that take one family of addresses listen on that of this one. "
        "Empty: IPv4.",
    )
    ip_family_policy: Literal["", "SingleStack", "PreferDualStack", "RequireDualStack"] = Field(
        "", description="spec.ipFamilyPolicy of the graphs' Services; empty: the cluster's default."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Pull policy of the pods' images."
    )
    allow_pod_templates: str = Field(
        "",
        description="What podTemplates may have beyond the restricted standard, the chart's podTemplates.allow: "
        "hostIPC,capabilities=IPC_LOCK and so on, or everything.",
    )
    pod_template_profiles: str = Field(
        "",
        description="What podTemplates of namespaces labelled penstock.dev/pod-templates may have besides, the chart's "
        "podTemplates.profiles: rdma:hostIPC,capabilities=IPC_LOCK and so on, with semicolons between them.",
    )
    gpu_resources: Annotated[str, Field(min_length=1)] = Field(
        ",".join(GPU_RESOURCES),
        description="Resources of nodes that are GPUs, names or patterns: a podTemplate may ask for no others than counted.",
    )
    workers: Annotated[int, Field(ge=1, le=64)] = Field(
        8,
        description="Number of graphs that are reconciled at the same time; they mostly wait for the API server.",
    )
    resync_interval: _Seconds = Field(
        300, description="Interval, in seconds, at which unchanged graphs are reconciled."
    )

    @field_validator("allow_pod_templates")
    @classmethod
    def _check_allowances(cls, text: str) -> str:
        try:
            allowances_of(text)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc
        return text

    @field_validator("pod_template_profiles")
    @classmethod
    def _check_profiles(cls, text: str) -> str:
        try:
            profiles_of(text)
        except ConfigError as exc:
            raise ValueError(str(exc)) from exc
        return text

    @model_validator(mode="after")
    def _check(self) -> OperatorSettings:
        if self.all_namespaces and self.namespace is not None:
            raise ValueError("--namespace and --all-namespaces are mutually exclusive; use one")
        return self


def settings_of(**given: object) -> OperatorSettings:
    """Return the validated settings of `penstock operator run`.

    Args:
        **given: Values by the name of a field of `OperatorSettings`; a value of None means the field's default.

    Raises:
        InvalidSpecError: Options are invalid; the error lists all of them.
    """
    try:
        return OperatorSettings.model_validate({key: each for key, each in given.items() if each is not None})
    except ValidationError as exc:
        problems = [
            ManifestProblem(
                path="".join(f"--{part}" for part in error["loc"]).replace("_", "-"),
                message=error["msg"].removeprefix("Value error, ")
                + (f" (given: {error['input']!r})" if error["loc"] else ""),
                file="options",
            )
            for error in exc.errors(include_url=False)
        ]
        raise InvalidSpecError(problems) from exc
