"""Which program starts an engine, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.api.manifests import load_graph
from penstock.core.errors import InvalidSpecError
from penstock.runtimes import runtime_of
from penstock.runtimes.programs import check_program, program_of
from penstock.runtimes.vllm import Vllm

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "vllm-disaggregated.yaml"


def _spec(folder):
    spec = load_graph(SAMPLE).spec
    engine = spec.engine.model_copy(update={"python_environment": None if folder is None else str(folder)})
    return spec.model_copy(update={"engine": engine})


def test_a_runtimes_name_is_a_plug_in():
    """Found by its entry point, as a third party's is."""
    assert isinstance(runtime_of("vllm"), Vllm)


def test_a_program_is_of_the_environment_or_of_the_path():
    """Without a folder its name alone is started."""
    assert program_of(_spec(None), "vllm") == "vllm"
    assert program_of(_spec("/opt/vllm"), "vllm") == "/opt/vllm/bin/vllm"


def test_a_program_that_is_not_there_is_refused(tmp_path):
    """Named with what its environment has to have; one that is there passes."""
    with pytest.raises(InvalidSpecError, match=r"bin/vllm is not a program here.*has vLLM 0\.32"):
        check_program(_spec(tmp_path), "vllm", "vLLM 0.32")
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    check_program(_spec(tmp_path), "vllm", "vLLM 0.32")
