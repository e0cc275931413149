"""A planner's learned state: reads it from the ledger, shows it, exports it for another graph, and resets it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.api import GraphDeployment, Role
from penstock.api.manifests import read_text
from penstock.api.planner import READ_IN_MODES
from penstock.core.errors import ConfigError, LedgerError, LedgerFileError
from penstock.core.logs import get_logger
from penstock.core.validation import findings
from penstock_planner.core.following import restore
from penstock_planner.core.ledger_history import LearnedStateInfo
from penstock_planner.core.older_names import learned_with_present_names
from penstock_planner.core.records import MALFORMED, Record
from penstock_planner.decide.capacity.corrections import SlaMemory
from penstock_planner.decide.codec import from_plain, to_plain
from penstock_planner.decide.config import config_from
from penstock_planner.decide.objective import cost
from penstock_planner.decide.objective.shadow_fleets import Growth, Hindsight
from penstock_planner.decide.policies.adaptive.memory import AdaptiveMemory
from penstock_planner.decide.policy import policy_of
from penstock_planner.decide.state import Learned, PlannerState, for_other_graph, resumed
from penstock_planner.ledger import FILE_NAME, Ledger, read_ledger
from penstock_planner.options import PlannerOptions

VERSION: Final = 4
"""Version of the export's format; raised when a reader of the previous version would misunderstand the file."""

RENAMED_VERSION: Final = 3
"""Version of exports in which some fields have other names, see `older_names`. Such exports can still be read."""

LEARNING: Final = READ_IN_MODES["memory"]
"""Modes that learn. In the other modes, learned state that is given as a start is ignored."""

log = get_logger(__name__)


class _Memories(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    adaptive: AdaptiveMemory
    sla: SlaMemory | None = None


class LearnedStateExport(BaseModel):
    """Learned state of a planner, exported as a file from which another graph's planner can start.

    Attributes:
        version: Version of the format of the file.
        model: Name of the served model.
        profile: Name of the model of the performance profile used in mode sla; empty in other modes.
        gpus: Number of GPUs per worker by role.
        memory: The learned state. Its times are simulated seconds relative to the newest decision in the ledger (the
            decision log), so none is above 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[4] = VERSION
    model: str
    profile: str = ""
    gpus: Mapping[Role, Annotated[int, Field(ge=0)]]
    memory: dict[str, Any]


def learnt(folder: Path) -> LearnedStateExport:
    """Return the learned state of the planner whose ledger (decision log) is in ``folder``.

    Raises:
        LedgerError: the ledger cannot be read.
        ConfigError: the ledger has no record, or its planner has not learned anything.
    """
    records = read_ledger(folder, newest=1).records
    header = _newest_header(records, folder)
    newest = next((record for record in reversed(records) if "state" in record), None)
    if newest is None:
        raise LedgerFileError(
            f"{folder}: does not hold a planner's state; give the --log-dir of a planner that has run"
        )
    try:
        state, model = from_plain(PlannerState, newest["state"]), header["served_model_name"]
        config = config_from(header["config"])
        kinds = config.policy.states
        memory = resumed(state, kinds, -newest["at_s"], 0.0).learned
        adaptive = AdaptiveMemory.read(memory)
    except MALFORMED as exc:
        raise LedgerFileError(
            f"{folder}: the newest state is incomplete ({exc!r}); use the version that wrote it"
        ) from exc
    if AdaptiveMemory.KEY not in memory:
        raise ConfigError(
            f"{folder}: mode {config.mode} has not learnt anything; modes adaptive and sla learn from "
            "their first decision on"
        )
    pulls = newest.get("window", {}).get("pulls", ())
    pools = pulls[-1]["pools"] if pulls else {}
    gpus = {
        role: config.engine_gpus(role, pools.get(role.value, {}).get("gpus", 0)) for role in adaptive.roles
    }
    return LearnedStateExport(
        model=model,
        profile=config.performance.model if config.performance is not None else "",
        gpus=gpus,
        memory={key: value for key, value in to_plain(memory).items() if key in {each.KEY for each in kinds}},
    )


def _newest_header(records: tuple[Record, ...], folder: Path) -> Record:
    for record in reversed(records):
        if record["type"] == "header":
            return record
    raise ConfigError(f"{folder}: the ledger has no record yet; let the planner decide first")


def in_words(known: LearnedStateExport) -> str:
    """Return the learned state of a planner as text: one line for the served model, and one for each role."""
    return "\n".join([f"model {known.model}", *memory_in_words(known.memory, known.gpus)])


def memory_in_words(remembered: Learned, gpus_of: Mapping[Role, int]) -> list[str]:
    """Return a list of lines that describe a planner's learned state, one for each role.

    In mode sla, another line compares observed times with those of the performance profile.

    Args:
        remembered: Learned state of mode adaptive or sla.
        gpus_of: Number of GPUs per worker by role.
    """
    memory, lines = AdaptiveMemory.read(remembered), []
    entry = Role.PREFILL if Role.PREFILL in gpus_of else Role.AGGREGATED
    for role, gpus in gpus_of.items():
        startup_s, speed = memory.of(role).startup_s, memory.work.tokens_per_s
        words = ["start-up time not observed" if startup_s is None else f"start-up time {startup_s:,.0f} s"]
        if role is entry:
            words.append(
                "throughput not known" if speed is None else f"{speed:,.0f} prompt tokens/s per worker"
            )
        past = memory.hindsight.get(role, Hindsight())
        floor = cost.in_words(past, gpus)
        words.append(floor or f"too few requests in {past.seen_s / 3600:.1f} h to choose a floor")
        lines.append(f"{role.value}: {'; '.join(words)}")
    if "sla" in remembered:
        sla = SlaMemory.read(remembered)
        ratios = {"prefill": sla.prefill, "TTFT": sla.ttft, "ITL": sla.itl}
        words = [f"{name} {each.observed_s / each.expected_s:.2f}" for name, each in ratios.items()]
        lines.append(f"observed times as a multiple of the profile's: {', '.join(words)}")
    return lines


def former_run(folder: Path, learning_identity: str) -> LearnedStateInfo | None:
    """Return a description of the learned state that a planner would find in a ledger's folder; None if there is none.

    Also returns None if the ledger cannot be read. ``is_taken`` of the result tells whether the new planner would use
    the state.

    Args:
        folder: Folder of the ledger (decision log).
        learning_identity: Identity of the new planner's model, engine, profile and time scale, as
            `DecideConfig.learning_identity`.
    """
    try:
        records = read_ledger(folder, newest=1).records
        newest = next((record for record in reversed(records) if "state" in record), None)
        if newest is None:
            return None
        known = AdaptiveMemory.read(from_plain(PlannerState, newest["state"]).learned)
    except (LedgerError, *MALFORMED):
        return None
    if not known.seen_s:
        return None
    is_taken = known.is_of(learning_identity)
    return LearnedStateInfo(
        newest.get("wall_s"), known.learnt_from, known.seen_s, is_taken, learning_identity
    )


def former_run_in_words(left: LearnedStateInfo, folder: str | Path, now_s: float) -> str:
    """Return one line that says whether the planner uses the learned state of an earlier run, and why not or how to reset it.

    Args:
        left: Description of the learned state, as returned by `former_run`.
        folder: Folder of the ledger (the decision log).
        now_s: Current time, real seconds since 1970.
    """
    age = "" if left.until_wall_s is None else f" until {_duration(max(0.0, now_s - left.until_wall_s))} ago"
    what = f"what it learnt{age} ({left.seen_s / 3600:.1f} h of demand"
    what += f"; {left.learnt_from})" if left.learnt_from else ")"
    if not left.is_taken:
        differs = _differing(left.learning_identity, left.learnt_from)
        return f"the planner does not use {what}: this graph differs" + (f" in {differs}" if differs else "")
    reset_by = f"penstock planner memory reset --log-dir {folder}"
    return f"the planner continues with {what}; to start afresh, stop it and run `{reset_by}`"


def _differing(now: str, then: str) -> str:
    """Return the differences between two values of `DecideConfig.learning_identity` as text; empty if either is unknown."""
    if not now or not then:
        return ""
    ours, theirs = ({part.partition(" ")[0]: part for part in origin.split(", ")} for origin in (now, then))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    this, other = (", ".join(each.get(name, f"no {name}") for name in names) for each in (ours, theirs))
    return f"{this} instead of {other}"


def _duration(real_s: float) -> str:
    units = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"))
    return next(
        (f"{real_s / unit_s:.1f} {name}" for unit_s, name in units if real_s >= unit_s), f"{real_s:.0f} s"
    )


def as_json(known: LearnedStateExport) -> bytes:
    """Return the content of a file of exported learned state: the state as indented JSON."""
    return orjson.dumps(known.model_dump(mode="json"), option=orjson.OPT_INDENT_2) + b"\n"


def start_from(options: PlannerOptions, graph: GraphDeployment | None) -> Learned:
    """Return the learned state in the file of ``--memory``.

    The planner starts with it if its ledger (decision log) holds no learned state. The result has the values by key of
    the policy that learned them; it is empty without the option. If a ledger exists, a missing file is only logged.

    Args:
        options: Options of the planner that starts.
        graph: Graph of that planner; None if it is unknown, so that its GPUs per worker are not compared with those in
            the file.

    Raises:
        ConfigError: the file cannot be read, or was learned from another model or other workers.
    """
    if options.memory is None or options.mode not in LEARNING:
        return {}
    path = Path(options.memory).expanduser()
    if not path.exists() and (options.log_folder() / FILE_NAME).exists():
        # A restart must not fail because of a file that an earlier start has read.
        log.warning("--memory does not exist: only the ledger is used", path=str(path))
        return {}
    return memory_in(read_text(path), f"--memory: {path}", options, graph)


def memory_in(text: str, origin: str, options: PlannerOptions, graph: GraphDeployment | None) -> Learned:
    """Return the learned state in an exported file, by key of the policy, so that another graph's planner can start with it.

    Replicas and requests of the graph in which it was learned are left out.

    Args:
        text: Content of the export file.
        origin: Name of the file or ConfigMap with the export, for error messages.
        options: Options of the planner that starts.
        graph: Graph of the planner that starts; None if it is unknown, so that its GPUs per worker are not compared
            with those in the export.

    Raises:
        ConfigError: the text is not exported learned state, or was learned from another model or other workers.
    """
    known = _parsed(text, origin)
    if known.model != options.served_model_name:
        raise ConfigError(
            f"{origin}: was learnt from model {known.model}, this planner's is {options.served_model_name}; give an export "
            "of the same model"
        )
    if graph is not None:
        config = options.decide_config(graph)
        workers = {
            each.role: config.engine_gpus(each.role, each.gpus) for each in graph.spec.workers.values()
        }
        if workers != known.gpus:
            raise ConfigError(
                f"{origin}: was learnt from workers of {_gpus_text(known.gpus)}, this graph's are {_gpus_text(workers)}; give an export "
                "of a graph of the same shape"
            )
    return for_other_graph(known.memory, policy_of(options.mode).states)


def _gpus_text(gpus: Mapping[Role, int]) -> str:
    return ", ".join(f"{role.value} {count} GPUs" for role, count in sorted(gpus.items()))


def _parsed(text: str, origin: str) -> LearnedStateExport:
    try:
        plain = orjson.loads(text)
    except orjson.JSONDecodeError as exc:
        raise ConfigError(f"{origin}: not JSON ({exc}); export it again") from exc
    version = plain.get("version") if isinstance(plain, dict) else None
    if version == RENAMED_VERSION:
        version = VERSION
        plain |= {"version": VERSION, "memory": learned_with_present_names(plain.get("memory"))}
    if version != VERSION:
        raise ConfigError(
            f"{origin}: version {str(version)[:40]}, this one reads {VERSION}; export it with `penstock planner memory export`"
        )
    try:
        known = LearnedStateExport.model_validate(plain)
        memories = _Memories.model_validate_json(orjson.dumps(known.memory), strict=True)
    except ValidationError as exc:
        raise ConfigError(f"{origin}: {findings(exc, root='file', most=1)}; export it again") from exc
    except (
        TypeError,
        RecursionError,
    ) as exc:  # orjson writes less deeply nested values than it reads
        raise ConfigError(f"{origin}: nested too deeply ({exc}); export it again") from exc
    for role, past in memories.adaptive.hindsight.items():
        is_complete = past.fleets.keys() == set(Growth) and past.floor <= past.sizes
        if not is_complete or any(len(each) != past.sizes for each in _by_floor(past)):
            raise ConfigError(
                f"{origin}: memory.adaptive.hindsight.{role.value} lacks fleets, or has lists of different lengths; export it again"
            )
    if any(
        number < 0 or not math.isfinite(number)
        for number in _numbers(to_plain(for_other_graph(known.memory, (AdaptiveMemory, SlaMemory))))
    ):
        raise ConfigError(f"{origin}: has a number below 0; export it again")
    return known


def _by_floor(past: Hindsight) -> Iterator[tuple[float, ...]]:
    yield past.idle_s
    yield past.since_s
    for fleets in past.fleets.values():
        yield from (fleets.started_s, fleets.backlogs, fleets.late, fleets.replica_s)


def _numbers(plain: Any) -> Iterator[float]:
    if isinstance(plain, Mapping):
        plain = tuple(plain.values())
    if isinstance(plain, tuple | list):
        for each in plain:
            yield from _numbers(each)
    elif isinstance(plain, int | float):
        yield plain


def reset(folder: Path) -> None:
    """Discard the learned state of the planner whose ledger (decision log) is in ``folder``, so that it starts without any.

    All earlier records are kept; a header without learned state is appended.

    Raises:
        LedgerError: the ledger cannot be read or written.
        ConfigError: a planner is running with the ledger, or the ledger has no record.
    """
    header = _newest_header(read_ledger(folder, newest=1).records, folder)
    ledger = Ledger(folder / FILE_NAME if folder.is_dir() else folder)
    try:
        history = restore(ledger.tail(), config_from(header["config"]))
        if history is None:
            raise ConfigError(f"{folder}: the ledger has no header; there is nothing to discard")
        # A resumed header, as a restart writes it: the current interval and requested changes continue.
        forgetting = {
            **header,
            "at_s": history.newest_s,
            "wall_s": history.wall_s,
            "resumed": True,
            "timeline": history.timeline,
            "origin_s": history.origin_s,
            "start_s": history.schedule.start_s,
            "starts": history.starts,
            "state": replace(history.state, learned={}),
        }
        ledger.append(forgetting, durable=True)
    except MALFORMED as exc:
        raise LedgerError(f"{folder}: incomplete record ({exc!r}); use the version that wrote it") from exc
    finally:
        ledger.close()
