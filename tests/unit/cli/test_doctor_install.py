"""Whether a machine is ready: each lack alone gives one finding with its remedy."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import doctor_install
from penstock.cli.doctor import doctor
from penstock.cli.doctor_install import EXTRAS, InstallFacts, install_facts, install_findings
from penstock.core.errors import ConfigError
from penstock_operator.doctor.findings import Severity

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def ready(tmp_path):
    """A machine that has everything."""
    return InstallFacts(
        cores=2,
        memory_gib=7.8,
        missing={extra: [] for extra in EXTRAS},
        programs=frozenset(doctor_install.PROGRAMS),
        open_files=4096,
        processes=-1,
        folder=tmp_path / "state",
        is_writable=True,
        taken_ports=frozenset(),
        has_worker_ports=True,
        shm_mib=1024.0,
    )


def test_a_ready_machine_says_what_is_there(tmp_path):
    """Nothing is bad, and every line is a fact."""
    found = list(install_findings(ready(tmp_path)))

    assert {each.severity for each in found} == {Severity.OK}
    said = {each.subject: each.message for each in found}
    assert said["machine"].startswith("2 cores, 7.8 GiB of memory")
    assert said["extras"] == f"installed: {', '.join(EXTRAS)}"
    assert said["other programs"] == "found: docker, helm, kind, kubectl, nvidia-smi"
    assert said["ports"] == "8000, 6006 and the workers' ports are free"


@pytest.mark.parametrize(
    ("change", "severity", "subject", "message"),
    [
        (
            {"missing": {"plots": ["matplotlib"]}},
            Severity.UNKNOWN,
            "programs",
            "matplotlib is not installed; needed for penstock demo and report",
        ),
        ({"is_writable": False}, Severity.PROBLEM, "state", "is not writable"),
        ({"open_files": 1024}, Severity.WARNING, "open files", "may open 1024 files"),
        ({"processes": 500}, Severity.WARNING, "processes", "may have 500 processes and threads"),
        (
            {"taken_ports": frozenset({8000})},
            Severity.WARNING,
            "ports",
            "port 8000 is in use; it is the default of: router of penstock up",
        ),
        ({"has_worker_ports": False}, Severity.PROBLEM, "ports", "no port between 21000"),
        ({"shm_mib": 64.0}, Severity.WARNING, "/dev/shm", "it has 64 MiB; vLLM on several GPUs needs 1024"),
        ({"shm_mib": None}, Severity.WARNING, "/dev/shm", "it does not exist"),
    ],
)
def test_a_lack_has_one_finding_and_a_remedy(tmp_path, change, severity, subject, message):
    """The others stay ok."""
    found = install_findings(replace(ready(tmp_path), **change))

    bad = [each for each in found if each.severity is not Severity.OK]
    assert [(each.severity, each.subject) for each in bad] == [(severity, subject)]
    assert message in bad[0].message
    assert bad[0].remedy


def test_programs_that_are_absent_are_named_with_their_use(tmp_path):
    """They are not a fault: a demo needs none."""
    found = install_findings(replace(ready(tmp_path), programs=frozenset({"helm"})))
    said = next(each.message for each in found if each.subject == "other programs")
    assert said.startswith("found: helm; not found: docker (images), kind (a cluster on this machine)")


def test_every_extra_of_the_distribution_is_known():
    """But those that only bundle others."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"demo", "dev"}


def test_packages_are_looked_up_in_the_distributions_own_metadata(monkeypatch):
    """Markers and bounds are not part of a name, and what is not an extra is not listed."""
    listed = [
        "click>=8.1",
        "absent-one<4,>=3 ; extra == 'plots'",
        'absent-two>=1; sys_platform == "linux" and extra == "plots"',
        'click>=8; extra == "gateway"',
        'absent-three; extra == "dev"',
    ]
    monkeypatch.setattr(doctor_install, "requires", lambda _name: listed)
    found = doctor_install.missing_packages()
    assert {extra: names for extra, names in found.items() if names} == {
        "plots": ["absent-one", "absent-two"]
    }


def test_this_machine_can_be_read():
    """The command prints a line for each subject, and refuses flags of the other two kinds."""
    assert install_facts().cores >= 1
    printed = CliRunner().invoke(doctor, ["--install"]).output
    assert " programs: Penstock " in printed
    assert " machine: " in printed
    for more in (["--local"], ["-n", "x"], ["-A"], ["--graph", "g"]):
        with pytest.raises(ConfigError, match="--install"):
            CliRunner().invoke(doctor, ["--install", *more], catch_exceptions=False)
