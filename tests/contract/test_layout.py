"""The house keeps its shape: layers, purity, packages that could shadow others."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.api.engine import PROFILES
from penstock.engine import profiles

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench/house"))
from source import Source

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


def test_src_holds_one_package():
    """`operator` beside `penstock` on the path would replace the module that half of Python imports."""
    assert [path.name for path in (ROOT / "src").iterdir()] == ["penstock"]


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_test_folders_hold_no_packages(folder):
    """Importlib mode needs test folders without __init__.py."""
    assert list((ROOT / folder).rglob("__init__.py")) == []


def test_every_measured_package_exists_and_has_a_floor():
    """Coverage of the pure packages is measured and held; a package that is renamed or split stays so."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    measured = tool["coverage"]["run"]["source_pkgs"]

    assert [
        name for name in measured if not list(ROOT.glob(f"src/{name.replace('.', '/')}/__init__.py"))
    ] == []
    assert set(measured) == set(tool["penstock"]["coverage_floors"])


def test_every_folder_of_modules_is_a_package():
    """A folder without `__init__.py` would be left out of the wheel's types and of the import contracts."""
    folders = {path.parent for path in (ROOT / "src").rglob("*.py")}

    assert [str(each) for each in folders if not (each / "__init__.py").exists()] == []
    assert (ROOT / "src/penstock/py.typed").exists()


def test_no_code_asks_for_a_runtime_by_name():
    """Beside its own module, api/runtimes.py alone names a runtime; a CEL rule's text is made of its traits."""
    asked = re.compile(r"""runtime['"\])]*\s*(?:==|!=|is|in)\s.*['"](?:vllm|dynamo|simulated)['"]""")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if asked.search(line)
    ]
    assert found == []


def test_no_file_or_function_of_the_product_is_too_long():
    """500 lines a file, 61 a function; `make house` counts the tests', too."""
    product = Source(ROOT, "src")

    assert product.long_files() + product.long_functions() == []


def test_the_api_knows_every_profile_that_comes_with_penstock():
    """A profile that is added is added in both places."""
    assert list(PROFILES) == profiles.names()
