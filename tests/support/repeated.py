"""Plugin: ``--repeat FILE --times N`` runs the tests whose names the file has, N times each, as tests/stress.py asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROUND = "_round"
_CHOSEN = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer both options."""
    parser.addoption(
        "--repeat", metavar="FILE", type=Path, help="run the tests that this file names, a line each"
    )
    parser.addoption("--times", type=int, default=1, metavar="N", help="run each of them N times")


def pytest_configure(config: pytest.Config) -> None:
    """Read the names."""
    file = config.getoption("repeat")
    config.stash[_CHOSEN] = frozenset(file.read_text(encoding="utf-8").splitlines() if file else ())


@pytest.fixture(name=_ROUND)
def round_fixture(request: pytest.FixtureRequest) -> int:
    """Return which of the rounds this is."""
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make N tests of each."""
    functions = {name.partition("[")[0] for name in metafunc.config.stash[_CHOSEN]}
    if metafunc.definition.nodeid in functions:
        times = metafunc.config.getoption("times")
        metafunc.fixturenames.append(_ROUND)
        metafunc.parametrize(
            _ROUND, range(times), indirect=True, ids=[f"round{each}" for each in range(times)]
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not named."""
    if chosen := config.stash[_CHOSEN]:
        items[:] = [each for each in items if _without_round(each.nodeid) in chosen]


def _without_round(name: str) -> str:
    name = re.sub(r"\[round\d+\]$", "", name)
    return re.sub(r"(?<=\[)round\d+-|-round\d+(?=\]$)", "", name)
