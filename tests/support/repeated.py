"""Plugin: ``--times N`` runs each chosen test N times, as tests/stress.py asks for."""

from __future__ import annotations

import pytest

_ROUND = "_round"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--times``."""
    parser.addoption("--times", type=int, default=1, metavar="N", help="run each chosen test N times")


@pytest.fixture(name=_ROUND)
def round_fixture(request: pytest.FixtureRequest) -> int:
    """Return which of the rounds this is."""
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make N tests of each."""
    times = metafunc.config.getoption("times")
    if times > 1:
        metafunc.fixturenames.append(_ROUND)
        metafunc.parametrize(
            _ROUND, range(times), indirect=True, ids=[f"round{each}" for each in range(times)]
        )
