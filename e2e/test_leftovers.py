"""Installed over what an earlier release left: its definitions, its graphs, one of them being deleted, and its Leases."""

from __future__ import annotations

import pytest
from kube import SYSTEM, wait_for
from traffic import Load


@pytest.mark.nightly
def test_a_new_installation_takes_up_what_the_old_one_left(kube, deploy, install):
    """Streams continue without one; then the edit and the deletion that nobody carried out meanwhile come about."""
    kept = deploy(model={"contextTokens": 4096}, engine={"streamIntervalTokens": 8})
    doomed = deploy("aggregated")
    load = Load(kept, "load", concurrency=8, max_tokens=400)
    before = {pod["metadata"]["uid"] for pod in kept.pods("router,prefill,decode")}

    kube.helm("uninstall", "penstock", "--namespace", SYSTEM, "--wait")
    kept.patch({"services": {"frontend": {"replicas": 3}}})
    kube.kubectl("delete", "gd", doomed.name, *doomed.scope, "--wait=false")
    assert doomed.object()["metadata"]["finalizers"] == ["penstock.dev/drain"]
    install()

    wait_for("the edit is carried out", lambda: kept.ready("router") == 3, 120)
    wait_for("nothing is left of the deleted graph", lambda: not doomed.remains(), 120)
    kept.wait_ready()
    outcome = load.stop()
    assert outcome.lost == []
    assert outcome.answered > 8
    assert before <= {pod["metadata"]["uid"] for pod in kept.pods("router,prefill,decode")}


@pytest.mark.nightly
def test_an_uninstallation_right_after_a_deletion_leaves_no_finalizer(kube, deploy, install):
    """`kubectl delete --wait=false` and at once `helm uninstall`: Helm waits until the streams are finished and the graph is gone."""
    doomed = deploy(model={"contextTokens": 4096}, engine={"streamIntervalTokens": 8})
    load = Load(doomed, "load", concurrency=8, max_tokens=600)
    load.finish()
    kube.kubectl("delete", "gd", doomed.name, *doomed.scope, "--wait=false")

    kube.helm("uninstall", "penstock", "--namespace", SYSTEM, "--wait")

    assert not kube.get("gd", *doomed.scope)
    wait_for("nothing is left of the deleted graph", lambda: not doomed.remains(), 120)
    assert load.stop().lost == []
    install()
