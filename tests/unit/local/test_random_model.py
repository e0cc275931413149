"""A model made here is one that Hugging Face's own readers take; equal arguments give equal files."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from penstock.cli.make_model import make_model
from penstock.core.errors import ConfigError
from penstock.local.random_model import RandomModel, safetensors, write_model


def _read(content):
    """Return header and data of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def test_every_tensor_lies_where_the_header_says():
    """Names, shapes and sizes are those of the configuration; nothing is left over or overlaps."""
    header, data = _read(safetensors({"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float32)}))

    assert header["a"] == {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    assert header["b"] == {"dtype": "BF16", "shape": [5], "data_offsets": [12, 22]}
    assert len(data) == 22


def test_files_follow_from_the_arguments(tmp_path):
    """Twice the same bytes; another seed changes the weights and nothing else."""
    first, second, other = (tmp_path / each for each in ("first", "second", "other"))
    names = [path.name for path in write_model(first, RandomModel())]
    write_model(second, RandomModel())
    write_model(other, RandomModel(seed=8))

    assert [(first / each).read_bytes() == (second / each).read_bytes() for each in names] == [True] * 5
    assert [each for each in names if (first / each).read_bytes() != (other / each).read_bytes()] == [
        "model.safetensors"
    ]


def test_another_model_in_the_folder_is_not_overwritten(tmp_path):
    """The folder of another recipe: its graph would not start any more. The same model again is not an other one."""
    made = write_model(tmp_path, RandomModel(vocabulary=2048))
    kept = [path.read_bytes() for path in made]
    refused = CliRunner().invoke(make_model, [str(tmp_path)])
    assert str(refused.exception) == (
        f"{tmp_path}: holds another model, by config.json, model.safetensors, tokenizer.json; choose another folder, or "
        "replace it: --replace"
    )
    assert [path.read_bytes() for path in made] == kept
    assert CliRunner().invoke(make_model, [str(tmp_path), "--vocabulary", "2048"]).exit_code == 0
    assert CliRunner().invoke(make_model, [str(tmp_path), "--replace"]).exit_code == 0


@pytest.mark.parametrize("text", ["Water that waits above the dam", "Zürich 東京 🚰\n\t", ""])
def test_every_text_survives_the_tokenizer(tmp_path, text):
    """Byte-level: nothing is unknown."""
    write_model(tmp_path, RandomModel())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_width_that_makes_no_whole_head_is_refused(tmp_path):
    """The message names the next width that does."""
    with pytest.raises(ConfigError, match=r"--hidden-size: 100 .* use 80"):
        write_model(tmp_path, RandomModel(hidden_size=100))
