"""How the tests of commands run them."""

from __future__ import annotations

import pytest

from penstock.cli.main import main


@pytest.fixture
def run(capfd):
    """Return a function that runs a command line in this process and returns exit status, stdout and stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, arguments)))
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call
