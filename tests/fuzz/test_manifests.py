from dataclasses import fields
from pathlib import Path

import yaml

from penstock.api.manifests import load_graph, parse_manifests
from penstock.core.errors import ConfigError, InvalidSpecError
from penstock_dynamo.importer import import_dgd

ROOT = Path(__file__).parents[2]
SAMPLES = [path.read_text() for path in sorted((ROOT / "manifests/samples").glob("*.yaml"))]
IMPORTS = [path.read_text() for path in sorted((ROOT / "manifests/import").glob("*.yaml"))]
TOKENS = [
    "null", "~", "[]", "{}", "[[", "}}", "''", '"', "'", ": ", "- ", "\n", "\n\n", "  ", "\t", "#", "---\n", "...\n",
    "%YAML 9.9\n", "&a ", "*a ", "<<: *a\n", "!!python/object:os.system ", "!!binary ", "!x ", "? ", "| ", ">-\n",
    ".inf", "-.inf", ".nan", "-1", "0", "1e999", "0x10", "0o7", "1_000", "12:30:45", "2026-01-01", "true", "yes",
    "9" * 400, "9" * 5000, "²", "a" * 5000, "é", "\u2028", "\x00", "\x7f", "\ufeff", "\ud7ff", "\U0001f600",
    "kind: GraphDeployment\n", "kind: ScalingAdapter\n", "spec: *a\n", "[" * 60, "{a: " * 60, "metadata: {name: a}\n",
    "replicas: 99999999999999999999\n", "services: []\n", "podTemplate: {spec: 1}\n", "1: 2\n", "null: 1\n", "? [a]\n: 1\n",
]  # fmt: skip


def broken(rng, mutate, corpus):
    """Break a text anywhere, or give some of its keys other values, so that it mostly stays YAML."""
    if rng.random() < 0.4:
        return mutate(rng, corpus, TOKENS, longest=50_000)
    lines = rng.choice(corpus).split("\n")
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(lines))
        key, colon, _value = lines[at].partition(": ")
        change = rng.randrange(5)
        if change == 0:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif change == 1:
            del lines[at]
            lines = lines or [""]
        elif change == 2:
            lines[at] = "  " + lines[at]
        else:
            lines[at] = key + (colon or ": ") + rng.choice(TOKENS)
    return "\n".join(lines)


def named(problems, name, data):
    """Check that problems name the file and, where they are about a place in it, the line."""
    for problem in problems:
        assert problem.file == name, problem
        assert problem.message, problem
        assert problem.line is None or 1 <= problem.line <= data.count("\n") + 2, problem
        assert problem.line is not None or not problem.path or problem.path.startswith("(converted)"), problem


def test_any_manifest_is_a_graph_or_named_problems(rounds, mutate):
    """No text ends in a traceback: it gives objects, or problems with file, line and message."""
    for name, rng in rounds:
        data = broken(rng, mutate, SAMPLES)
        try:
            manifests, problems = parse_manifests(data, "f.yaml")
            assert problems or any(getattr(manifests, each.name) for each in fields(manifests))
            named(problems, "f.yaml", data)
        except BaseException as exc:
            exc.add_note(f"{name}\n{data[:3000]}")
            raise


def test_any_import_is_a_graph_or_named_problems(rounds, mutate):
    """No DynamoGraphDeployment ends in a traceback: it converts to a valid graph, or is refused with its file."""
    for name, rng in rounds:
        data = broken(rng, mutate, IMPORTS)
        try:
            graph = import_dgd(data, "f.yaml").graph
            assert parse_manifests(yaml.safe_dump(graph.to_manifest()))[1] == []
        except InvalidSpecError as refusal:
            named(refusal.problems, "f.yaml", data)
        except BaseException as exc:
            exc.add_note(f"{name}\n{data[:3000]}")
            raise


def test_any_bytes_of_a_file_are_a_graph_or_a_config_error(rounds, mutate, tmp_path):
    """Files that are not UTF-8, or not text at all, are refused by name like any other."""
    path = tmp_path / "f.yaml"
    corpus = [each.encode() for each in SAMPLES]
    tokens = [b"\xff", b"\x80", b"\xed\xa0\x80", b"\0", b"\xef\xbb\xbf", b"\r", b"\r\n", b"\xfe\xff"]
    for name, rng in rounds:
        path.write_bytes(mutate(rng, corpus, tokens, longest=50_000))
        try:
            load_graph(path)
        except ConfigError as refusal:
            named(getattr(refusal, "problems", ()), str(path), "\n" * 50_000)
        except BaseException as exc:
            exc.add_note(name)
            raise
