"""Scripts outside of the product import only names that the product has today."""

import ast
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {
    path.parent.name
    for folder in ("src", "operator", "planner")
    for path in ROOT.glob(f"{folder}/*/__init__.py")
}


def missing(script: Path) -> list[str]:
    """Return the imports of a script from the product that the product cannot serve."""
    found = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        found += [
            f"{module}: {name}"
            for module, name in wanted
            if module.partition(".")[0] in PRODUCT and not has(module, name)
        ]
    return found


def has(module: str, name: str | None) -> bool:
    """Return whether a module exists and has a name, which may be a module, too."""
    try:
        if name is None or not hasattr(importlib.import_module(module), name):
            importlib.import_module(module if name is None else f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


def test_benches_and_examples_import_what_exists():
    """Nothing else runs most of them before a release; they break when a name of the product moves."""
    scripts = [*(ROOT / "bench").rglob("*.py"), *(ROOT / "docs/examples").rglob("*.py")]
    assert len(scripts) > 20
    assert {str(each.relative_to(ROOT)): missing(each) for each in scripts if missing(each)} == {}
