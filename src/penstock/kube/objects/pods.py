"""What Kubernetes says of pods and operator and planner read alike: labels of groups, phases, the kubelet's reasons.

Pure. What a part reads for itself alone stays with that part.
"""

from __future__ import annotations

from typing import Final

GROUP_KEY_LABEL: Final = "leaderworkerset.sigs.k8s.io/group-key"
"""LeaderWorkerSet's own: which group a pod belongs to."""

WORKER_INDEX_LABEL: Final = "leaderworkerset.sigs.k8s.io/worker-index"
"""LeaderWorkerSet's own: a pod's ordinal within its group; 0 is the leader."""

FINISHED_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""A pod's phases in which its containers are gone for good."""

REPLICA_FAILURE: Final = "ReplicaFailure"
"""Kubernetes' own condition of a workload whose pods the API server refuses; on ScalingAdapters it says the same."""

CRASH_LOOP: Final = "CrashLoopBackOff"

PULL_REASONS: Final = frozenset(
    {
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImageInspectError",
        "ImagePullBackOff",
        "InvalidImageName",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
CONFIG_REASONS: Final = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""Reasons of waiting containers: kubernetes/pkg/kubelet/images/types.go and kuberuntime."""
