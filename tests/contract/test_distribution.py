"""What a package index and `pip install` get: links that work, samples, bounded dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from penstock.api.runtimes import PENSTOCK_IMAGE

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of this tree, built without isolation by what the dev extra installs."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=_ROOT,
        check=True,
        capture_output=True,
    )
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_every_sample(wheel):
    """A user without a clone has what README starts with."""
    samples = {path.name for path in (_ROOT / "manifests" / "samples").rglob("*.yaml")}
    held = {Path(name).name for name in wheel.namelist() if name.startswith("penstock/cli/data/samples/")}
    assert samples == held


def test_the_wheel_holds_the_chart(wheel):
    """`penstock demo --kubernetes` installs it where there is no clone; the image is built of the same files."""
    chart = _ROOT / "charts" / "penstock"
    files = {str(path.relative_to(chart)) for path in chart.rglob("*") if path.is_file()}
    place = "penstock/cli/data/chart/"
    assert {name.removeprefix(place) for name in wheel.namelist() if name.startswith(place)} == files
    assert "COPY charts/penstock ./charts/penstock\n" in (_ROOT / "Dockerfile").read_text()
    assert "!charts/penstock\n" in (_ROOT / ".dockerignore").read_text()


def test_the_index_page_has_absolute_links_and_project_urls(wheel):
    """README's relative links and pictures work where there is no repository around them."""
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(name))
    targets = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= {
        url.split(",")[0] for url in metadata.get_all("Project-URL")
    }


def test_the_image_is_built_on_a_digest():
    """The tag may move; every stage is of the one base."""
    text = (_ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}


def test_the_image_gets_every_package():
    """What the wheel is built of, the Dockerfile copies and .dockerignore lets through."""
    copied = set(re.findall(r"^COPY (?!--)(\S+) \./", (_ROOT / "Dockerfile").read_text(), re.MULTILINE))
    let_through = set(re.findall(r"^!(\S+)", (_ROOT / ".dockerignore").read_text(), re.MULTILINE))
    build = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = {each.partition("/")[0] for each in build["targets"]["wheel"]["packages"]}
    assert packages == set(build["dev-mode-dirs"])

    assert packages <= copied
    assert packages <= let_through


@pytest.mark.parametrize("variant", ["standard", "tensorboard"])
def test_the_image_pins_what_the_distribution_asks_for(variant):
    """A dependency whose bounds changed, or a new one, is pinned again by `make lock`; each pin has a hash."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [
        "gateway",
        "kubernetes",
        "kv-events",
        "prometheus",
        "tracing",
        *(["tensorboard"] if variant == "tensorboard" else []),
    ]
    asked = [
        *project["dependencies"],
        *(each for name in extras for each in project["optional-dependencies"][name]),
    ]
    text = (_ROOT / "requirements" / f"{variant}.txt").read_text().replace("\\\n", "")
    pins = [line.split("--hash=", 1) for line in text.splitlines() if line and not line.startswith("#")]
    pinned = {(pin := Requirement(each[0])).name: pin.specifier for each in pins}

    assert all(len(each) == 2 for each in pins)
    for requirement in map(Requirement, asked):
        (version,) = (each.version for each in pinned[requirement.name.lower()])
        assert version in requirement.specifier, f"{requirement}: pinned to {version}; run make lock"


def test_no_two_packages_of_the_image_write_the_same_file():
    """The one that is installed last would overwrite the other's: xds-protos has OpenTelemetry's messages, too."""
    text = (_ROOT / "requirements/standard.txt").read_text()
    pinned = set(re.findall(r"^([a-z0-9.-]+)==", text, re.MULTILINE))
    here = {each.metadata["Name"].lower().replace("_", "-"): each for each in distributions()}
    modules = Counter(
        str(file)
        for name in pinned
        if name in here
        for file in here[name].files or ()
        if file.suffix == ".py"
    )

    assert len(modules) > 1000
    assert [file for file, owners in modules.items() if owners > 1] == []


def test_every_dependency_of_users_has_both_bounds():
    """A release of a dependency that breaks its interface cannot break an installation."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *(each for name in extras if name != "dev" for each in extras[name])]
    requirements = [Requirement(each) for each in listed]
    missing = [
        each.name
        for each in requirements
        if each.name not in {"penstock", "setuptools"}
        and not {">=", "<"} <= {part.operator for part in each.specifier}
    ]
    assert missing == []


def test_the_release_pushes_the_images_that_chart_and_manifests_pull():
    """Their names come from one place, the version without the tag's v."""
    run = subprocess.run(
        ["make", "--silent", "image-names"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    names = dict(line.split("=", 1) for line in run.stdout.splitlines())
    chart = yaml.safe_load((_ROOT / "charts/penstock/Chart.yaml").read_text())
    values = yaml.safe_load((_ROOT / "charts/penstock/values.yaml").read_text())
    pulled = f"{values['image']['repository']}:{chart['appVersion']}"

    assert names == {"standard": pulled, "tensorboard": f"{pulled}-tensorboard"}
    assert names["standard"] == PENSTOCK_IMAGE
    assert f"image: {pulled}\n" in (_ROOT / "manifests/install.yaml").read_text()

    release = (_ROOT / ".github/workflows/release.yml").read_text()
    pushed = re.findall(r"tags: \"\$\{\{ steps\.names\.outputs\.(\w+) \}\}\"", release)
    assert sorted(pushed) == sorted(names)
    assert release.count('tags: "') == len(pushed)


def test_workflows_run_nothing_that_can_move() -> None:
    """A step alongside the release's rights is one commit, its version in a comment; no program is fetched as `latest`."""
    movable = []
    for path in sorted((_ROOT / ".github/workflows").glob("*.yml")):
        text = path.read_text()
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used, path.name
        movable += [
            f"{path.name}: {name}"
            for name, comment in used
            if not name.startswith("./")
            and not (re.search(r"@[0-9a-f]{40}$", name) and re.match(r" # v\d+\.\d+", comment))
        ]
        movable += [f"{path.name}: {each}" for each in re.findall(r"\S+@latest", text)]
    assert movable == []
