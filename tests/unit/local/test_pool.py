"""Graphs of one machine that share GPUs: claims under a lock, exclusive ids, and what faults leave behind."""

import contextlib
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from penstock.api import Role
from penstock.cli.main import cli
from penstock.core.errors import ClusterError, ConfigError, NotFoundError
from penstock.core.local_state import EntryState
from penstock.local.build import UpOptions
from penstock.local.down import down
from penstock.local.pool import PoolFile, PoolMember, PoolStore
from penstock.local.starts import starting
from penstock.local.statefile import retire
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget
from penstock.local.up_pool import up_pool

GPUS = 8


def ids(name):
    """The GPU ids that a graph's workers hold."""
    return StateStore.of(name).read().gpus_in_use()


def drained(name):
    """Let every draining worker of a graph end."""

    def change(state):
        for entry in [key for key, each in state.entries.items() if each.state is EntryState.DRAINING]:
            state = retire(state, entry)
        return state, None

    StateStore.of(name).update(change)


def started(name):
    """Let every requested worker of a graph serve."""

    def change(state):
        for entry in [key for key, each in state.entries.items() if each.state is EntryState.REQUESTED]:
            state = state.change(entry, state=EntryState.READY)
        return state, None

    StateStore.of(name).update(change)


def put(name, state_of, entry_of, first):
    """Write the statefile of a graph that starts with one worker of each role."""
    state = state_of(name, gpus=GPUS, budget=2, pool="p", speed=1.0)
    for order, role in enumerate(("prefill", "decode")):
        entry = entry_of(
            role, role, order=order, state=EntryState.READY, gpus=(first + order,), url="http://h:1"
        )
        state = state.with_entry(f"{name}_{role}", entry)
    StateStore.of(name).write(state)


@pytest.fixture
def pool(state_of, entry_of):
    """A pool of eight GPUs: a is guaranteed four, b two."""
    members = {
        "a": PoolMember(4, GPUS, 0, (1, 1), (0, 1)),
        "b": PoolMember(2, GPUS, 0, (1, 1), (2, 3)),
    }
    store = PoolStore.of("p")
    store.found(PoolFile("p", GPUS, 0.0, members))
    put("a", state_of, entry_of, 0)
    put("b", state_of, entry_of, 2)
    return store


async def scaled(name, prefill, decode):
    """Bring a graph's workers to numbers, as far as it is let."""
    target = LocalTarget(StateStore.of(name))
    for role, replicas in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        try:
            await target.scale(role, replicas, decision_id="d1")
        except ClusterError as exc:
            assert "wait for a drain to end" in str(exc)  # noqa: PT017 - the only refusal there may be
    await target.close()


async def test_a_graph_borrows_and_gives_back_and_never_shares_an_id(pool):
    """B takes the six that a leaves; when a wants its four, b's grant falls to four and a grows as b's workers end."""
    assert pool.claim("b", (1,) * 6).gpus == 6
    await scaled("b", 3, 3)
    assert ids("b") == {2, 3, 4, 5, 6, 7}
    started("b")

    assert pool.claim("a", (1,) * 4).gpus == 2, "nothing is free yet"
    assert [row.waits_for for row in pool.rows()] == [("b",), ()]
    assert pool.claim("b", (1,) * 6).gpus == 4
    await scaled("b", 2, 2)
    assert pool.claim("a", None).gpus == 2, "b's workers still drain"
    drained("b")
    assert pool.claim("a", None).gpus == 4
    await scaled("a", 2, 2)
    assert len(ids("a")) == len(ids("b")) == 4
    assert not ids("a") & ids("b")


async def test_a_graph_hears_who_holds_what_it_lacks_and_when_it_comes(pool, monkeypatch):
    """Who gives back, expected after what a drain took before; and who keeps the rest."""
    now = [100.0]
    monkeypatch.setattr("penstock.core.clock.time.monotonic", lambda: now[0])
    pool.claim("b", (1,) * 6)
    await scaled("b", 3, 3)
    started("b")
    assert pool.claim("a", (1,) * 3).note == "GpuPool p: 1 more GPU will follow: b returns 1"
    pool.claim("b", None)
    await scaled("b", 2, 3)
    pool.claim("b", None)
    now[0] = 140.0
    drained("b")
    assert pool.claim("a", (1,) * 4).gpus == 3, "and a drain took 40 s"
    pool.claim("b", None)
    await scaled("b", 2, 2)
    pool.claim("b", None)
    now[0] = 150.0
    claim = pool.claim("a", (1,) * 6)
    assert (claim.gpus, claim.note) == (
        3,
        (
            "GpuPool p: 2 more GPUs will follow: b returns 2, expected in 30 s; "
            "1 more is not available until another graph needs fewer: b holds 5 and will hold 3 (guaranteed 2)"
        ),
    )
    assert (await LocalTarget(StateStore.of("a")).observe()).grant_note == claim.note
    assert pool.note("a", 1.0) == claim.note
    assert pool.note("x", 1.0) == ""
    assert PoolStore.of("gone").note("a", 1.0) == ""


async def test_a_graph_does_not_grow_above_its_grant(pool):
    """Its budget is the grant, though ids are free."""
    assert pool.claim("a", (1, 1, 1)).gpus == 3
    await scaled("a", 3, 3)
    assert len(ids("a")) == 3


def test_a_graph_that_has_ended_leaves_the_pool(pool):
    """Without its statefile, which was there, none of its workers exists."""
    pool.claim("a", None)
    StateStore.of("b").path.unlink()
    assert pool.claim("a", (1,) * 8).gpus == 8
    assert [row.graph for row in pool.rows()] == ["a"]


def test_a_pool_goes_with_its_last_graph(pool):
    """`down` of one leaves it, that of the last deletes its file and lock; one that cannot be read stays."""
    down("a", timeout_s=None, now=True)
    assert [row.graph for row in pool.rows()] == ["b"]
    broken = PoolStore.of("broken")
    broken.path.write_text("{")
    down("b", timeout_s=None, now=True)
    assert [each.path for each in PoolStore.all()] == [broken.path]
    assert not pool.path.with_name("p.pool.lock").exists()


def test_a_graph_that_has_not_come_yet_keeps_what_it_starts_on(pool):
    """Until its arbiter has written its statefile, and no longer than somebody starts it: an `up` may be killed."""
    StateStore.of("b").path.unlink()
    members = {**pool.read().members, "b": PoolMember(2, GPUS, 0, (1, 1), (6, 7))}
    pool._write(PoolFile("p", GPUS, 0.0, members))
    with starting(["b"]):
        assert pool.claim("a", (1,) * 8).gpus == 6
        with pool.ids_of_others("a") as others:
            assert others == {6, 7}
    assert pool.claim("a", (1,) * 8).gpus == 8


def test_a_statefile_that_cannot_be_read_frees_nothing(pool):
    """Its grant stays with it, and no worker starts where its ids are not known."""
    pool.claim("b", (1,) * 4)
    StateStore.of("b").path.write_text("{")
    assert pool.claim("a", (1,) * 8).gpus == 4
    with pytest.raises(ConfigError, match="the GPUs of b are not known"), pool.ids_of_others("a"):
        pass


async def test_a_planner_brings_what_its_last_decision_bid_for(pool, monkeypatch):
    """A look without a decision brings nothing new; a graph in no pool has no grant."""
    target = LocalTarget(StateStore.of("b"))
    seen = await target.observe()
    assert (seen.grant, seen.guaranteed) == (2, 2)
    assert (await LocalTarget(StateStore.of("a")).observe()).guaranteed == 4
    monkeypatch.setattr("penstock.local.target.bid_sizes", lambda decision: decision)
    target.decided((1,) * 5, None)
    target.decided(None, None)
    assert (await target.observe()).grant == 5
    store = StateStore.of("b")
    state = store.read()
    store.write(replace(state, arbiter=replace(state.arbiter, pool="")))
    seen = await target.observe()
    assert (seen.grant, seen.guaranteed) == (None, None)
    await target.close()


async def test_a_lost_pool_file_decides_nothing(pool):
    """The backend counts as unreadable, and every worker stays."""
    pool.remove()
    target = LocalTarget(StateStore.of("a"))
    with pytest.raises(ClusterError, match="no such pool"):
        await target.observe()
    with pytest.raises(ClusterError, match="no such pool"):
        await target.scale(Role.DECODE, 2, decision_id="d1")
    await target.close()


@pytest.mark.parametrize("seed", range(5))
async def test_kills_between_two_writes_never_bring_the_graphs_above_the_pool(pool, monkeypatch, seed):
    """A claim dies before its pool file, or before its statefile is written; the graphs grow and drain as they like."""
    chance = random.Random(seed)
    update, write = StateStore.update, PoolStore._write
    for _ in range(60):
        name = chance.choice("ab")
        with monkeypatch.context() as patch:
            dies = chance.choice(["never", "never", "before pool", "before state"])
            if dies == "before pool":
                patch.setattr(PoolStore, "_write", lambda *_: (_ for _ in ()).throw(OSError("killed")))
            if dies == "before state":
                patch.setattr(StateStore, "update", lambda *_: (_ for _ in ()).throw(OSError("killed")))
            with contextlib.suppress(OSError):
                pool.claim(name, (1,) * chance.randint(2, 8))
        assert (StateStore.update, PoolStore._write) == (update, write)
        await scaled(name, chance.randint(1, 4), chance.randint(1, 4))
        if chance.random() < 0.5:
            drained(name)
        started(name)
        assert len(ids("a")) + len(ids("b")) == len(ids("a") | ids("b")) <= GPUS


async def test_what_a_dead_planner_wanted_counts_for_three_minutes(pool, monkeypatch):
    """Then its graph wants the workers that it has, without those that drain, and others borrow; its next word counts again."""
    now = [600.0]
    monkeypatch.setattr("penstock.core.clock.time.monotonic", lambda: now[0])
    pool.claim("b", (1,) * 6)
    await scaled("b", 2, 1)
    started("b")
    await scaled("b", 1, 1)

    def targets(name, bid):
        pool.claim(name, bid)
        return {graph: (each.wanted, each.target) for graph, each in pool.read().grants.items()}

    now[0] = 780.0
    assert targets("a", (1,) * 8) == {"a": (8, 5), "b": (6, 3)}
    now[0] = 781.0
    assert targets("a", None) == {"a": (8, 6), "b": (2, 2)}
    assert targets("b", None) == {"a": (8, 5), "b": (6, 3)}


def test_a_pool_whose_graphs_run_is_not_founded_again(pool):
    """They would lose what they were granted."""
    with pytest.raises(ConfigError, match="p has graphs that run: a, b; stop them with `penstock down`"):
        pool.found(pool.read())


def test_the_command_shows_who_holds_wants_and_waits(pool):
    """As a table, and as JSON."""
    pool.claim("b", (1,) * 6)
    printed = CliRunner().invoke(cli, ["pool"]).output
    assert "pool p: 8 GPUs, 4 held, 4 free" in printed
    found = json.loads(CliRunner().invoke(cli, ["pool", "p", "--json"]).output)
    row = {"graph": "b", "guaranteed": 2, "held": 2, "grant": 6, "wanted": 6, "target": 6, "waits_for": []}
    assert row in found["graphs"]


def test_the_command_names_what_is_missing(state_folder):
    """No pool, or several."""
    run = CliRunner()
    assert isinstance(run.invoke(cli, ["pool"]).exception, NotFoundError)
    for name in ("one", "two"):
        PoolStore.of(name).found(PoolFile(name, 1, 0.0, {}))
    assert "there are several pools: one, two" in str(run.invoke(cli, ["pool"]).exception)
    assert "is not a name of a GpuPool" in str(run.invoke(cli, ["pool", "../one"]).exception)


MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: {name}}}
spec:
  model: {{name: m, servedName: m}}
  runtime: simulated
  services:
    frontend: {{role: router}}
    worker: {{role: aggregated, replicas: 2}}
"""
POOL = """
apiVersion: penstock.dev/v1alpha1
kind: GpuPool
metadata: {name: shared}
spec:
  gpus: 4
  graphs:
    - {match: {name: one}, guaranteedGpus: 2}
    - {match: {name: two}, guaranteedGpus: 2, maxGpus: 3}
  reclaim: {order: [newest, priority]}
"""


@pytest.fixture
def files(tmp_path):
    """Two graphs of two GPUs each, and a pool of four."""
    paths = [tmp_path / f"{name}.yaml" for name in ("one", "two", "pool")]
    for path in paths[:2]:
        path.write_text(MANIFEST.format(name=path.stem))
    paths[2].write_text(POOL)
    return paths


async def test_graphs_start_on_ports_and_ids_of_their_own(files, monkeypatch):
    """The second one's router has the next port, its workers the ids that the first left; logs are apart."""
    seen = []

    async def start(file, options, _progress):
        place = (file.stem, options.port, options.pool.taken, options.log_dir.name)
        seen.append((*place, PoolStore.of("shared").read()))

    monkeypatch.setattr("penstock.local.up_pool.start", start)
    options = UpOptions(port=9100, log_dir=files[0].parent)
    await up_pool(files[:2], files[2], options, lambda *_: None)
    assert [each[:4] for each in seen] == [("one", 9100, set(), "one"), ("two", 9101, {0, 1}, "two")]
    members = seen[0][4].members
    assert seen[0][4].order == ("newest", "priority")
    assert {name: (each.starts_on, each.bid, each.max_gpus) for name, each in members.items()} == {
        "one": ((0, 1), (1, 1), 4),
        "two": ((2, 3), (1, 1), 3),
    }


async def test_a_graph_that_does_not_start_takes_the_pool_with_it(files, monkeypatch):
    """All or none."""

    async def start(*_):
        raise ClusterError("not ready")

    monkeypatch.setattr("penstock.local.up_pool.start", start)
    with pytest.raises(ClusterError, match="not ready"):
        await up_pool(files[:2], files[2], UpOptions(), lambda *_: None)
    assert PoolStore.all() == []


async def test_what_is_for_one_graph_alone_is_refused(files):
    """A name, the machine's GPUs, two graphs of one name."""
    for options in (UpOptions(namespace="x"), UpOptions(gpus=2), UpOptions(planner={"log-dir": "x"})):
        with pytest.raises(ConfigError, match="for one graph"):
            await up_pool(files[:2], files[2], options, lambda *_: None)
    with pytest.raises(ConfigError, match="two graphs are called one"):
        await up_pool([files[0], files[0]], files[2], UpOptions(), lambda *_: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["one", "two"], "2 graphs; to start several at once add --pool"),
        (["one", "two", "--pool", "pool", "--foreground"], "--foreground: supports only one graph"),
    ],
)
def test_several_graphs_need_a_pool(files, arguments, words):
    """And none of them stays in front."""
    known = {path.stem: str(path) for path in files}
    done = CliRunner().invoke(cli, ["up", *(known.get(each, each) for each in arguments)])
    assert words in str(done.exception)


def test_the_command_shows_a_pool_of_a_cluster(monkeypatch):
    """By its status, as this machine's; what is wrong with it is said, and which one is meant must be clear."""
    row = {"guaranteed": 2, "serial": 1, "granted": 2, "wanted": 4, "target": 2, "held": 3}
    rows = [{**row, "name": "batch"}, {**row, "name": "chat", "held": 1, "granted": 1}]
    bad = {"type": "GuaranteesMet", "status": "False", "message": "chat lacks 1 of 2 GPUs"}
    status = {"gpus": {"total": 6}, "graphs": rows, "conditions": [bad]}
    made = {"metadata": {"name": "shared"}, "spec": {"gpus": 6}, "status": status}
    known = [made]

    class Client:
        async def list(self, _kind, *, namespace):
            assert namespace == "serving"
            return SimpleNamespace(items=known)

        async def get(self, _kind, name, *, namespace):
            assert (name, namespace) == ("shared", "serving")
            return made

    @contextlib.asynccontextmanager
    async def connected(_self):
        yield Client()

    monkeypatch.setattr("penstock.cli.cluster.Connection.open", connected)
    run = CliRunner()
    printed = run.invoke(cli, ["pool", "-n", "serving"]).output
    assert "pool shared: 6 GPUs, 4 held, 2 free" in printed
    assert "chat lacks 1 of 2 GPUs" in printed
    found = json.loads(run.invoke(cli, ["pool", "shared", "-n", "serving", "--json"]).output)
    assert [each["waits_for"] for each in found["graphs"]] == [[], ["batch"]]
    known.append({"metadata": {"name": "other"}})
    assert "there are several pools: other, shared" in str(
        run.invoke(cli, ["pool", "-n", "serving"]).exception
    )
    known.clear()
    assert "namespace serving has no GpuPool" in str(run.invoke(cli, ["pool", "-n", "serving"]).exception)
    assert "add --namespace or --all-namespaces" in str(run.invoke(cli, ["pool", "--context", "x"]).exception)
