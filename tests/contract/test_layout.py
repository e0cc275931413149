"""The house keeps its shape: layers, purity, packages that could shadow others."""

import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from grimp import ImportGraph, build_graph

from penstock.api.engine import PROFILES
from penstock.engine import profiles

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench/house"))
from source import PRODUCT, components

ROOT = Path(__file__).resolve().parents[2]


def test_layers_and_purity_hold():
    """import-linter's contracts pass."""
    result = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_the_import_contracts_see_every_module():
    """Without the inner `__init__.py` of a package they would see none of it, and hold of nothing."""
    assert len(imports().modules) == len(modules())


@functools.cache
def imports() -> ImportGraph:
    """Who imports whom in the packages that the contracts name."""
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    return build_graph(*linted, cache_dir=None)


def modules() -> list[Path]:
    """Every Python file of the product."""
    return [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]


def test_each_folder_of_the_product_holds_one_package():
    """`operator/__init__.py` would replace the standard library's module, which half of Python imports."""
    packages = {
        folder: sorted(path.parent.name for path in (ROOT / folder).glob("*/__init__.py"))
        for folder in PRODUCT
    }
    assert packages == {
        "src": ["penstock", "penstock_dynamo", "penstock_importers", "penstock_sglang", "penstock_trtllm"],
        "operator": ["penstock_operator"],
        "planner": ["penstock_planner"],
    }
    assert [path for folder in PRODUCT for path in (ROOT / folder).glob("*.py")] == []


def test_the_standard_library_keeps_its_operator():
    """From the repository's root, with every folder of an editable installation on the path."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in PRODUCT)
    for environment in ({}, {"PYTHONPATH": paths}, {"PYTHONPATH": f"{ROOT}{os.pathsep}{paths}"}):
        subprocess.run(
            [sys.executable, "-c", "import operator; assert operator.add(1, 2) == 3"],
            cwd=ROOT,
            env=os.environ | environment,
            check=True,
        )


@pytest.mark.parametrize("folder", ["tests", "bench"])
def test_test_folders_hold_no_packages(folder):
    """Importlib mode needs test folders without __init__.py."""
    assert list((ROOT / folder).rglob("__init__.py")) == []


def test_every_measured_package_exists_and_has_a_floor():
    """Coverage of the pure packages is measured and held; a package that is renamed or split stays so."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    measured = tool["coverage"]["run"]["source_pkgs"]

    assert [name for name in measured if not list(ROOT.glob(f"*/{name.replace('.', '/')}/__init__.py"))] == []
    assert set(measured) == set(tool["penstock"]["coverage_floors"])


def test_every_folder_of_modules_is_a_package():
    """A folder without `__init__.py` would be left out of the wheel's types and of the import contracts."""
    folders = {path.parent for path in modules()}

    assert [str(each) for each in folders if not (each / "__init__.py").exists()] == []
    assert {path.parent.name for path in ROOT.glob("*/*/py.typed")} == {
        "penstock",
        "penstock_dynamo",
        "penstock_importers",
        "penstock_sglang",
        "penstock_trtllm",
        "penstock_operator",
        "penstock_planner",
    }


def test_no_fast_test_has_a_limit_in_seconds_of_its_own():
    """What hangs is ended by pytest's one limit; a shorter one fails on a busy machine, where nothing is wrong."""
    limit = re.compile(r"\btimeout=[1-9]|asyncio\.timeout\([1-9]|wait_for\([^\n]*, [1-9]")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("unit", "fuzz")
        for path in (ROOT / "tests" / folder).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if limit.search(line)
    ]
    assert found == []


def test_no_code_asks_for_a_runtime_by_name():
    """Alongside its own module, api/runtimes.py alone names a runtime; a CEL rule's text is made of its traits."""
    asked = re.compile(r"""runtime['"\])]*\s*(?:==|!=|is|in)\s.*['"](?:vllm|dynamo|sglang|simulated)['"]""")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in modules()
        for line in path.read_text(encoding="utf-8").splitlines()
        if asked.search(line)
    ]
    assert found == []


def test_dynamos_identifiers_stand_in_its_own_package():
    """Modules, classes and metrics; elsewhere the CRD's rules read its traits, and a sentence or a source may name it."""
    identifier = re.compile(r"dynamo_\w|dynamowo\w|\bDYNAMO_\w|\bDYN_")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in modules()
        if "penstock_dynamo" not in path.parts and path.name != "runtimes.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if identifier.search(line)
    ]
    assert found == []


def test_no_modules_of_the_product_import_each_other_in_a_circle():
    """An import inside a function counts, too."""
    graph = imports()
    edges = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}

    assert [sorted(group) for group in components(edges) if len(group) > 1] == []


def test_the_api_knows_every_profile_that_comes_with_penstock():
    """A profile that is added is added in both places."""
    assert list(PROFILES) == profiles.names()
