"""Objects of other distributions, by entry point."""

from importlib.metadata import EntryPoint

import pytest

from penstock.core import plugins
from penstock.core.errors import ConfigError
from penstock.core.plugins import load, registered


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs distributions which register these objects."""

    def installed(*values):
        points = [EntryPoint("mine", value, "group") for value in values]
        monkeypatch.setattr(plugins, "entry_points", lambda **_: points)

    registered.cache_clear()
    yield installed
    registered.cache_clear()


def test_a_name_that_no_distribution_registered_is_refused(install):
    """With the names that are."""
    install("json:loads")
    with pytest.raises(ConfigError, match="thing 'yours': choose from mine, or install the package"):
        load("group", "yours", kind="thing")


@pytest.mark.parametrize("value", ["no_such_module:X", "penstock.core.plugins:no_such_name"])
def test_a_broken_registration_names_itself(install, value):
    """With the remedy, whether the module or the object is not there."""
    install(value)
    with pytest.raises(
        ConfigError, match=f"group: mine is registered as {value}.*install its distribution again"
    ):
        load("group", "mine", kind="thing")


def test_two_objects_of_one_name_are_refused(install):
    """Either could be meant; the same object twice is one."""
    install("json:loads", "json:loads")
    assert list(registered("group")) == ["mine"]
    registered.cache_clear()
    install("json:loads", "json:dumps")
    with pytest.raises(
        ConfigError, match="'mine' is registered as json:loads and as json:dumps; uninstall one"
    ):
        registered("group")
