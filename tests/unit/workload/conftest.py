"""Small traces, called synthetic, written where a test can break them."""

import pytest


@pytest.fixture
def mooncake_file(tmp_path):
    """A synthetic Mooncake trace of two batches, three and two requests."""
    rows = [
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}',
        '{"timestamp": 0, "input_length": 512, "output_length": 6, "hash_ids": [0]}',
        '{"timestamp": 0, "input_length": 1500, "output_length": 7, "hash_ids": [0, 2, 3]}',
        '{"timestamp": 3000, "input_length": 10, "output_length": 8, "hash_ids": [4]}',
        '{"timestamp": 3000, "input_length": 1024, "output_length": 9, "hash_ids": [0, 5]}',
    ]
    path = tmp_path / "synthetic.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def azure_file(tmp_path):
    """A synthetic Azure trace of three requests."""
    path = tmp_path / "synthetic.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:16:46.6805900,12,3"
    )
    return path
