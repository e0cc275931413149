"""The house keeps its shape: layers, purity, packages that could shadow others."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_layers_and_purity_hold():
    """import-linter's contracts pass."""
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_the_operator_folder_never_shadows_the_standard_library():
    """`operator/__init__.py` would replace the module that half of Python imports."""
    assert not (ROOT / "operator" / "__init__.py").exists()


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_test_folders_hold_no_packages(folder):
    """Importlib mode needs test folders without __init__.py."""
    assert list((ROOT / folder).rglob("__init__.py")) == []


def test_every_package_is_in_every_list():
    """A new package is built, typed and linted, or this fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tool = project["tool"]
    found = {path.parent.name for path in ROOT.glob("*/penstock_*/__init__.py")}

    assert found == {Path(p).name for p in tool["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert found == set(tool["importlinter"]["root_packages"])
    assert {path.parent.parent.name for path in ROOT.glob("*/penstock_*/__init__.py")} == set(
        tool["mypy"]["files"]
    )


def test_every_measured_package_exists_and_has_a_floor():
    """Coverage of the pure packages is measured and held; a package that is renamed or split stays so."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    measured = tool["coverage"]["run"]["source_pkgs"]

    assert [name for name in measured if not list(ROOT.glob(f"*/{name.replace('.', '/')}/__init__.py"))] == []
    assert set(measured) == set(tool["penstock"]["coverage_floors"])


def test_every_package_is_typed():
    """py.typed lets users' type checkers see the annotations."""
    packages = {path.parent for path in ROOT.glob("*/penstock_*/__init__.py")}

    assert [str(p) for p in packages if not (p / "py.typed").exists()] == []
