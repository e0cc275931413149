"""Options of the operator: defaults, environment, refusals; and the lazily imported command."""

from __future__ import annotations

import orjson
import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.core.errors import InvalidSpecError


def _dry_run(*arguments, **keys):
    answer = CliRunner().invoke(
        cli, ["operator", "run", "--dry-run", *arguments], catch_exceptions=False, **keys
    )
    return orjson.loads(answer.stdout)


def test_a_flag_beats_the_environment_and_that_the_default():
    """For switches, numbers and texts."""
    env = {"PENSTOCK_OPERATOR_METRICS_PORT": "9000", "PENSTOCK_OPERATOR_LEADER_ELECTION": "false"}
    options = _dry_run("--metrics-port", "9001", "--penstock-image", "me/penstock:1", env=env)
    chosen = [options[each] for each in ("metrics_port", "leader_election", "penstock_image", "workers")]
    assert chosen == [9001, False, "me/penstock:1", 8]
    assert _dry_run("--leader-election", env=env)["leader_election"] is True
    assert _dry_run("--all-namespaces")["all_namespaces"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--namespace", "a", "--all-namespaces"], "--namespace and --all-namespaces are mutually exclusive"),
        (["--namespace", "Not A Label"], "--namespace"),
        (["--metrics-port", "70000"], "--metrics-port"),
        (["--resync-interval", "0"], "--resync-interval"),
        (["--pod-template-profiles", "rdma"], "--pod-template-profiles.*write NAME:ENTRIES"),
    ],
)
def test_wrong_options_are_refused_by_their_flag(arguments, message):
    """With the value given."""
    with pytest.raises(InvalidSpecError, match=message):
        _dry_run(*arguments)
