"""The demo's own steps: its folder."""

import pytest

from penstock_cli.demo_run import clear
from penstock_core.errors import ConfigError


def test_a_demo_below_a_file_is_refused_with_the_remedy(tmp_path):
    """A file in the way is a mistake in --output-dir, told before anything starts."""
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"--output-dir .*/file/x: .*parents is a file; choose another folder"
    ):
        clear(tmp_path / "file" / "x")
