"""The store that kopf's handlers fill: what enters, what leaves, and what a list says of both."""

import pytest

from penstock.kube.kinds import SCALING_ADAPTER
from penstock.operator.handler_store import STALLED_S, HandlerStore, Listed
from penstock.operator.trim import trim_child

KEY = ("ns", "a")


def adapter(version, *, name="a", uid="u", **labels):
    """Return a ScalingAdapter."""
    return {
        "apiVersion": SCALING_ADAPTER.api_version,
        "kind": "ScalingAdapter",
        "metadata": {
            "namespace": "ns",
            "name": name,
            "uid": uid,
            "resourceVersion": str(version),
            "labels": {"managed": "yes", **labels},
        },
        "spec": {"replicas": version},
    }


class Harness:
    """A store, its changes and its clock."""

    def __init__(self):
        self.now_s = 0.0
        self.changes = []
        self.store = HandlerStore(
            SCALING_ADAPTER,
            labels={"managed": "yes"},
            trim=trim_child,
            on_change=lambda change, obj: self.changes.append((change, obj["spec"]["replicas"])),
            now_s=lambda: self.now_s,
        )


@pytest.fixture
def harness():
    """A store that holds nothing."""
    return Harness()


def test_reports_become_changes(harness):
    """A listed object is new, a newer one a change, an older one nothing; a deletion takes it away."""
    store = harness.store
    for change, version in ((None, 3), ("MODIFIED", 5), ("MODIFIED", 4), (None, 5), ("DELETED", 6)):
        store.report(change, adapter(version))
    assert harness.changes == [("ADDED", 3), ("MODIFIED", 5), ("DELETED", 6)]
    assert store.objects == {}


def test_a_late_deletion_spares_the_next_object_of_the_name(harness):
    """Kopf handles objects by uid, each in a task of its own: the order between two of them is not sure."""
    harness.store.report("ADDED", adapter(9, uid="second"))
    harness.store.report("DELETED", adapter(7, uid="first"))
    assert harness.store.objects[KEY]["metadata"]["uid"] == "second"


def test_an_object_without_the_labels_leaves(harness):
    """As it would leave a watch with a selector."""
    harness.store.report("ADDED", adapter(1))
    harness.store.report("MODIFIED", adapter(2, managed="no"))
    harness.store.report("ADDED", adapter(3, name="b", managed="no"))
    assert harness.changes == [("ADDED", 1), ("DELETED", 2)]


def test_what_a_list_does_not_show_is_removed_unless_it_is_newer(harness):
    """It vanished while the watch was broken; an object that was made after the list is none of its business."""
    store = harness.store
    store.report(None, adapter(1))
    store.report("ADDED", adapter(2, name="b", uid="old"))
    store.report("ADDED", adapter(12, name="c"))
    store.compare({("ns", "b"): Listed("new", 8)}, version=10)
    assert harness.changes[3:] == [("DELETED", 1), ("DELETED", 2)]
    assert list(store.objects) == [("ns", "c")]


def test_a_comparison_adds_nothing_and_waits_for_the_handlers(harness):
    """An object is known only once a handler was called with it."""
    store = harness.store
    store.compare({KEY: Listed("u", 5)}, version=5)
    assert (store.objects, store.synced.is_set()) == ({}, False)
    store.report(None, adapter(5))
    assert store.synced.is_set()


def test_an_object_that_is_deleted_before_it_was_reported_holds_nobody_up(harness):
    """The next list does not show it."""
    store = harness.store
    store.compare({KEY: Listed("u", 5)}, version=5)
    store.compare({}, version=7)
    assert store.synced.is_set()


def test_what_no_handler_reports_is_a_stall(harness):
    """A change that stays unreported; one that is reported in time, with newer ones after it, is none."""
    store = harness.store
    store.report(None, adapter(1))
    store.report(None, adapter(1, name="b"))
    listed = {KEY: Listed("u", 4), ("ns", "b"): Listed("u", 4)}
    store.compare(listed, version=4)
    harness.now_s = STALLED_S - 1
    store.report("MODIFIED", adapter(4, name="b"))
    store.compare({KEY: Listed("u", 6), ("ns", "b"): Listed("u", 9)}, version=9)
    assert store.stalled() is None
    harness.now_s = STALLED_S
    assert store.stalled() == "scalingadapters: kopf has not reported ns/a for 60 s"
    store.restarted()
    assert store.stalled() is None


def test_a_second_list_asks_for_a_comparison(harness):
    """Kopf lists again after a broken watch; at the start it lists, too, and nothing is asked for."""
    store = harness.store
    store.report(None, adapter(1))
    store.compare({KEY: Listed("u", 1)}, version=1)
    assert not store.relisted.is_set()
    store.report(None, adapter(1))
    assert store.relisted.is_set()
