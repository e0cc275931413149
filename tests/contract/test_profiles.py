"""The names of profiles that the API knows are those of the files that come with the engine."""

from penstock.api.engine import PROFILES
from penstock.engine import profiles


def test_the_api_knows_every_profile_that_comes_with_penstock():
    """A profile that is added is added in both places."""
    assert list(PROFILES) == profiles.names()
