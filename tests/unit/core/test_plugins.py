"""Objects of other distributions, by entry point."""

from importlib.metadata import EntryPoint

import pytest

from penstock.core import plugins
from penstock.core.errors import ConfigError
from penstock.core.plugins import plugin, plugin_names


def test_a_name_that_no_distribution_registered_is_none():
    """The caller says what that means."""
    assert plugin("penstock.runtimes", "nobody-s") is None


@pytest.mark.parametrize("value", ["no_such_module:X", "penstock.core.plugins:no_such_name"])
def test_a_broken_registration_names_itself(monkeypatch, value):
    """With the remedy, whether the module or the object is not there."""
    point = EntryPoint("broken", value, "penstock.runtimes")
    monkeypatch.setattr(plugins, "entry_points", lambda **_: [point])
    with pytest.raises(ConfigError, match=f"broken is registered as {value}.*install its distribution again"):
        plugin("penstock.runtimes", "broken")


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("penstock.runtimes", {"dynamo", "simulated", "vllm"}),
        ("penstock.frontends", {"dynamo"}),
        ("penstock.metric_sources", {"dynamo", "router"}),
    ],
)
def test_what_ships_is_registered(group, names):
    """And can be imported."""
    assert names <= set(plugin_names(group))
    assert all(plugin(group, name) for name in names)
