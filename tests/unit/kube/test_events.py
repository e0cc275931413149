"""Events: one per change, repeats fold into a series, and a refusal never stops the operator."""

from __future__ import annotations

import pytest

from penstock.core.errors import ClusterError, ForbiddenError, NotFoundError
from penstock.kube.events import (
    FORGET_S,
    MAX_NOTE,
    EventMessage,
    EventRecorder,
)

GRAPH = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "GraphDeployment",
    "metadata": {"name": "llama", "namespace": "serving", "uid": "u-1", "resourceVersion": "7"},
}
NOTE = EventMessage("Repaired", "Deployment llama-decode: spec.replicas 3 -> 2", action="Apply")


class Api:
    """Keeps what is written; may refuse."""

    def __init__(self):
        self.created, self.patched, self.error = [], [], None

    async def create(self, obj, *, field_manager):
        """Keep a created object."""
        if self.error is not None:
            raise self.error
        self.created.append((field_manager, obj))
        return obj

    async def patch(self, kind, name, patch, *, namespace, field_manager):
        """Keep a patch."""
        if self.error is not None:
            raise self.error
        self.patched.append((kind.kind, namespace, name, patch))
        return {}


class Clock:
    """Seconds that a test moves."""

    s = 1_000_000.25

    def __call__(self):
        """Return the time."""
        return self.s


@pytest.fixture
def world():
    """API, clock, counter of dropped Events and recorder."""
    api, clock, dropped = Api(), Clock(), []
    sender = ("penstock-operator", "pod-1", "Reconcile")
    recorder = EventRecorder(api, *sender, on_dropped=lambda: dropped.append(1), now_s=clock)
    return api, clock, dropped, recorder


async def test_an_event_names_object_reason_and_sender(world):
    """And when, in the fields by which `kubectl get events` sorts."""
    api, _, _, recorder = world
    await recorder.emit(GRAPH, NOTE)
    [(manager, event)] = api.created
    name = event["metadata"].pop("name")
    assert name.startswith("llama.")
    assert manager == "penstock-operator"
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "serving"},
        "eventTime": "1970-01-12T13:46:40.250000Z",
        "firstTimestamp": "1970-01-12T13:46:40Z",
        "lastTimestamp": "1970-01-12T13:46:40Z",
        "count": 1,
        "source": {"component": "penstock-operator"},
        "reportingComponent": "penstock-operator",
        "reportingInstance": "pod-1",
        "action": "Apply",
        "reason": "Repaired",
        "type": "Normal",
        "message": NOTE.text,
        "involvedObject": {
            "apiVersion": "penstock.dev/v1alpha1",
            "kind": "GraphDeployment",
            "name": "llama",
            "namespace": "serving",
            "uid": "u-1",
            "resourceVersion": "7",
        },
    }


async def test_repeats_within_a_minute_write_nothing_and_then_one_count(world):
    """A repair that is undone every second costs one write a minute."""
    api, clock, _, recorder = world
    for _ in range(60):
        await recorder.emit(GRAPH, NOTE)
        clock.s += 1
    assert (len(api.created), len(api.patched)) == (1, 0)
    await recorder.emit(GRAPH, NOTE)
    name = api.created[0][1]["metadata"]["name"]
    repeated = {"count": 61, "lastTimestamp": "1970-01-12T13:47:40Z", "message": NOTE.text}
    assert api.patched == [("Event", "serving", name, repeated)]


async def test_a_repeat_after_an_hour_is_a_new_event(world):
    """Another day, another Event."""
    api, clock, _, recorder = world
    await recorder.emit(GRAPH, NOTE)
    clock.s += FORGET_S + 1
    await recorder.emit(GRAPH, NOTE)
    assert (len(api.created), len(api.patched)) == (2, 0)
    assert api.created[0][1]["metadata"]["name"] != api.created[1][1]["metadata"]["name"]


async def test_other_texts_are_other_events(world):
    """The numbers in the note tell changes apart."""
    api, _, _, recorder = world
    await recorder.emit(GRAPH, NOTE)
    await recorder.emit(GRAPH, EventMessage("Repaired", "Service llama-decode: spec.ports", is_warning=True))
    assert [event["type"] for _, event in api.created] == ["Normal", "Warning"]


async def test_the_same_decision_made_again_is_one_event_with_the_newest_id(world):
    """Refusals that come repeatedly are one line with a count."""
    api, clock, _, recorder = world
    for number in range(1, 5):
        await recorder.emit(GRAPH, EventMessage("ScaledUp", "decode 0 -> 1", detail=f"d00000{number}"))
        clock.s += 200
    assert [event["message"] for _, event in api.created] == ["decode 0 -> 1 (d000001)"]
    assert [patch["count"] for *_, patch in api.patched] == [2, 3, 4]
    assert api.patched[-1][-1]["message"] == "decode 0 -> 1 (d000004)"


async def test_a_series_whose_event_expired_starts_anew(world):
    """The API server keeps Events for an hour, or somebody deleted it."""
    api, clock, _, recorder = world
    await recorder.emit(GRAPH, NOTE)
    clock.s += 100

    async def gone(*_, **__):
        raise NotFoundError("404")

    api.patch = gone
    await recorder.emit(GRAPH, NOTE)
    assert len(api.created) == 2


@pytest.mark.parametrize("error", [ForbiddenError("403"), ClusterError("no answer")])
async def test_a_refusal_is_counted_and_forgotten(world, error):
    """Events are a courtesy."""
    api, _, dropped, recorder = world
    api.error = error
    await recorder.emit(GRAPH, NOTE)
    assert dropped == [1]


async def test_a_long_note_is_cut_between_characters(world):
    """The API server refuses more than 1024 bytes."""
    api, _, _, recorder = world
    await recorder.emit(GRAPH, EventMessage("Long", "ä" * 2000))
    note = api.created[0][1]["message"]
    assert len(note.encode()) <= MAX_NOTE
    assert set(note) == {"ä"}


async def test_memory_is_bounded():
    """The Event that came longest ago is forgotten, so that its repeat is a new one."""
    api = Api()
    recorder = EventRecorder(api, "penstock-operator", "pod-1", "Reconcile", remembered=2)
    for text in ("a", "b", "c", "c", "a"):
        await recorder.emit(GRAPH, EventMessage("R", text))
    assert [event["message"] for _, event in api.created] == ["a", "b", "c", "a"]
