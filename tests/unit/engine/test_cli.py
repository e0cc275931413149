"""`penstock engine`: the list of profiles, refusals, and a worker process from start to SIGTERM."""

import json

import pytest

from penstock.cli.main import main
from penstock.engine import profiles


def run_cli(capsys, *arguments):
    """Run the command in this process; return exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    output = capsys.readouterr()
    return caught.value.code or 0, output.out, output.err


def test_profiles_are_listed_with_their_quality(capsys):
    """One line each, with capacity and error."""
    code, out, _ = run_cli(capsys, "engine", "profiles")
    assert code == 0
    (line,) = [line for line in out.splitlines() if " h200-llama-3.1-8b-tp1 " in line]
    assert "945029" in line
    assert "fit, error 2.6% (max 9%)" in line
    assert len(out.splitlines()) == len(profiles.names()) + 1


def test_profiles_as_json(capsys):
    """Sources and origins of every figure."""
    code, out, _ = run_cli(capsys, "engine", "profiles", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert sorted(rows) == profiles.names()
    assert rows["h200-llama-3.1-8b-tp1"]["kv_capacity_is_measured"]
    assert not rows["h100-llama-3.3-70b-tp8"]["kv_capacity_is_measured"]
    assert all(row["prefill"]["source"] and row["decode"]["source"] for row in rows.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "h300"], "--profile 'h300' is unknown"),
        (["--max-model-len", "2000000"], "exceeds the KV cache"),
        (["--speed", "0"], "--speed: 0.0 must be a finite number above 0"),
        (["--kv-transfer-config", "{"], "--kv-transfer-config"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    ],
)
def test_wrong_configuration_exits_with_2(capsys, arguments, message):
    """One message on stderr, no traceback."""
    code, _, err = run_cli(capsys, "engine", "serve", "llama", "--port", "0", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
