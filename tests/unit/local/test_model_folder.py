"""Models that are folders: told of before workers fail for want of them."""

import pytest

from penstock.api import GraphSpec
from penstock.core.errors import InvalidSpecError
from penstock.local.build import check_model, model_warnings


def spec_of(name, runtime="vllm"):
    """Return a graph with the model."""
    services = {"frontend": {"role": "router"}, "worker": {"role": "aggregated"}}
    return GraphSpec.model_validate({"model": {"name": name}, "runtime": runtime, "services": services})


@pytest.mark.parametrize("name", ["./tiny-model", "../tiny-model", "/no/such/tiny-model"])
def test_a_path_without_a_folder_is_refused(name, tmp_path, monkeypatch):
    """Its workers would end at their start, several times, before anybody learnt why."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidSpecError, match=r"spec\.model\.name.*is no folder here.*make-model"):
        check_model(spec_of(name))
    check_model(spec_of(name, "simulated"))


def test_a_name_that_may_be_a_folder_is_warned_of(tmp_path, monkeypatch):
    """`tiny-model` may be an old id on Hugging Face; `org/model` is one."""
    monkeypatch.chdir(tmp_path)
    (warning,) = model_warnings(spec_of("tiny-model"))
    assert warning.path == "spec.model.name"
    assert "Hugging Face" in warning.message
    assert not list(model_warnings(spec_of("org/tiny-model")))
    assert not list(model_warnings(spec_of("tiny-model", "simulated")))
    (tmp_path / "tiny-model").mkdir()
    assert not list(model_warnings(spec_of("tiny-model")))
    check_model(spec_of("./tiny-model"))
