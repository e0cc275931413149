"""What a user can get wrong on the command line, and workers that cannot start: one clear error each."""

import json
import socket

import pytest

GOOD = '{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
FILES = {
    "torn.yaml": "metadata: {name: x\nspec: [\n",
    "corrupt.jsonl": GOOD + '{"timestamp": 3000, "input_le\n' + GOOD.replace(" 0,", " 6000,", 1),
    "empty.jsonl": "",
    "options.yaml": "Planner: {max-gpu-budgett: 3}\n",
}
BAD = [
    (("up", "torn.yaml"), ["torn.yaml:2", "malformed YAML", "check indentation"]),
    (("up", "absent.yaml"), ["absent.yaml", "no such file", "check the path"]),
    (("up", "unknown.yaml"), ["unknown.yaml:", "spec.planner.maxGpuBudgett", "did you mean maxGpuBudget?"]),
    (("up", "flapping.yaml"), ["decodeKvScaleDownThreshold: 0.95", "not below", "0.9", "lower it"]),
    (("up", "poor.yaml"), ["spec.planner.maxGpuBudget: 1", "fewer than the floors", "raise"]),
    (("up", "graph.yaml", "--speed", "inf"), ["--speed: inf", "finite number above 0"]),
    (("up", "graph.yaml", "--gpus", "1"), ["1 GPU", "maxGpuBudget 1", "raise"]),
    (("up", "graph.yaml", "--port", "TAKEN"), ["--port", "TAKEN", "in use", "another"]),
    (("router", "serve", "--model", "m", "--worker", "decode=http://127.0.0.1:9", "--worker",
      "prefill=http://127.0.0.1:9", "--port", "TAKEN"), ["port TAKEN", "in use", "--port"]),
    (("engine", "serve", "m", "--port", "TAKEN"), ["port TAKEN", "in use", "--port"]),
    (("engine", "serve", "m", "--block-size", "0"), ["--block-size: 0", "1 or more"]),
    (("load", "--trace", "absent.jsonl"), ["--trace absent.jsonl", "no such file", "mooncake"]),
    (("load", "--trace", "empty.jsonl"), ["--trace empty.jsonl", "empty", "give a"]),
    (("load", "--trace", "corrupt.jsonl", "--dry-run"), ["corrupt.jsonl:2", "not JSON", "--on-bad-row skip"]),
    (("load", "--trace", "mooncake", "--sample", "2"), ["--sample: 2.0", "at most 1"]),
    (("planner", "run", "--decode-kv-scale-up-threshold", "0.3", "--dry-run"),
     ["--decode-kv-scale-down-threshold: 0.5", "not below", "0.3", "lower it"]),
    (("planner", "run", "--max-gpu-budget", "1"), ["--max-gpu-budget: 1", "below the floor of 1", "raise it"]),
    (("planner", "run", "--config", "options.yaml"), ["max-gpu-budgett", "unknown option", "known are"]),
    (("planner", "run", "--namespace", "nobody"), ["--namespace: 'nobody'", "penstock up"]),
    (("planner", "explain"), ["--log-dir: needed", "no graph is running"]),
]  # fmt: skip


@pytest.fixture
def desk(world, monkeypatch):
    """Return the folder with the bad files, which is the working folder."""
    for name, content in FILES.items():
        (world.folder / name).write_text(content)
    graph = world.manifest().read_text()
    (world.folder / "unknown.yaml").write_text(graph.replace("maxGpuBudget:", "maxGpuBudgett:"))
    (world.folder / "flapping.yaml").write_text(
        graph.replace("planner: {", "planner: {decodeKvScaleDownThreshold: 0.95, ")
    )
    (world.folder / "poor.yaml").write_text(graph.replace("maxGpuBudget: 8", "maxGpuBudget: 1"))
    monkeypatch.chdir(world.folder)
    return world.folder


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: " ".join(value[:3]))
def test_bad_input_is_refused_with_key_value_bound_and_remedy(world, desk, arguments, words):
    """Exit 2 and one message on stderr without a traceback; nothing was started or written."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        done = world.run(*(argument.replace("TAKEN", port) for argument in arguments), timeout_s=20)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("penstock: ") == 1, done.stderr
    for word in words:
        assert word.replace("TAKEN", port) in done.stderr, done.stderr
    assert world.marked() == {}
    assert not world.statefile.exists()


def test_a_corrupt_row_is_left_out_on_request_and_counted(world, desk):
    """With --on-bad-row skip the other rows are planned, and the row that is not is named."""
    done = world.run("load", "--trace", "corrupt.jsonl", "--on-bad-row", "skip", "--dry-run")
    assert done.returncode == 0, done.stderr
    trace = json.loads(done.stdout)["trace"]
    assert trace["rows"] == 3
    assert [row.split(":")[0] for row in trace["skipped_rows"]] == ["line 2"]
    assert trace["output_tokens"] == 4


@pytest.mark.slow
def test_a_worker_that_dies_at_start_is_shown_restarted_and_given_up_with_its_words(world, eventually):
    """`status` shows the reason while it is tried again with a backoff; then `up` says it and leaves nothing."""
    manifest = world.manifest()
    manifest.write_text(
        manifest.read_text().replace("role: decode,", "role: decode, args: [--block-size, '0'],")
    )
    flags = ("--speed", 10, "--port", world.port, "--log-dir", world.log_dir)
    process = world.start("up", manifest, *flags, name="up")
    restarted = eventually(
        lambda: (entry := world.state().get("world_decode", {})).get("restarts", 0) >= 1 and entry,
        20,
        "restart",
    )
    assert "--block-size: 0 must be 1 or more" in restarted["reason"]
    shown = json.loads(world.run("status", "--json").stdout)
    decode = next(each for each in shown["processes"] if each["name"] == "world_decode")
    assert "exit code 2" in decode["reason"]
    assert decode["state"] == "starting"
    assert process.wait(40) == 1
    words = (world.folder / "up.out").read_text()
    for word in (
        "decode: gave up after 5 failures",
        "--block-size: 0 must be 1 or more",
        "everything was stopped",
    ):
        assert word in words
    assert "Traceback" not in words
    assert world.marked() == {}
    assert not world.statefile.exists()


@pytest.mark.slow
def test_a_second_up_and_a_load_that_does_not_fit_leave_the_running_graph_alone(world):
    """A second `up`, a wrong model and a wrong speed are errors of their own; the graph serves on."""
    manifest = world.manifest()
    world.up(manifest, speed=20, flags=("--no-planner",))
    again = world.run("up", manifest)
    assert again.returncode == 2
    assert "already running" in again.stderr
    assert "penstock down --namespace world" in again.stderr
    for flags, word in ((("--speed", 20, "--model", "nobody"), "serves m"), ((), "give --speed 20")):
        load = world.run("load", "--trace", "mooncake", "--limit", 2, "--url", world.url, *flags)
        assert load.returncode == 2
        assert word in load.stderr
    assert world.is_serving()
    assert {worker["state"] for worker in world.workers().values()} == {"ready"}
    world.down()
