"""Readers of both trace formats, and what each way of being broken says."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.workload.prompts import PromptMaker, block_text
from penstock.workload.traces import OnBadRow, TraceFormat, TraceRequest, load_trace, trace_of_rows


def test_a_mooncake_row_becomes_a_request(mooncake_file):
    """Milliseconds become seconds; ids and the line number are kept."""
    trace = load_trace(str(mooncake_file))

    assert trace.format is TraceFormat.MOONCAKE
    assert trace.requests[3] == TraceRequest(3.0, 10, 8, (4,), 4)
    assert len(trace.requests) == 5
    assert trace.skipped == {}
    assert trace.sha256 == hashlib.sha256(mooncake_file.read_bytes()).hexdigest()


def test_an_azure_row_becomes_a_request_without_ids(azure_file):
    """Time counts from the first row; seven decimals are read to the microsecond."""
    trace = load_trace(str(azure_file))

    assert trace.format is TraceFormat.AZURE
    assert trace.requests[0] == TraceRequest(0.0, 374, 44, None, 2)
    assert trace.requests[1].arrival_s == pytest.approx(4.314579)
    assert trace.requests[2].arrival_s == 60.0


def test_the_packaged_slice_is_the_real_beginning():
    """The built-in name gives 608 rows whose bytes are those that the README names."""
    trace = load_trace("mooncake")

    assert len(trace.requests) == 608
    assert trace.sha256 == "2e9b7f5d3125a6db947cdb26040a588592823e959f686bd4069fdbd942bf7e7d"
    assert trace.requests[0].input_tokens == 6758
    assert trace.requests[-1].arrival_s == 200.999


GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [0]}'


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"timestamp": 1, "input_length"', "Invalid JSON"),
        ("[1]", "row: [1]: Input should be an object"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [0]}', "timestamp: -1"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 5, "hash_ids": [0]}', "timestamp: 'x'"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5, "hash_ids": []}', "input_length: 0"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1.5, "hash_ids": [0]}', "output_length: 1.5"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": true, "hash_ids": [0]}',
            "output_length: True",
        ),
        ('{"timestamp": 1, "output_length": 5, "hash_ids": [0]}', "input_length: Field required"),
        (
            '{"input_length": 5, "output_length": 5, "hash_ids": [0]}',
            "timestamp: missing, and no earlier turn",
        ),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}',
            "hash_ids.0: 'a': Input should be a valid integer",
        ),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 5, "hash_ids": [0]}',
            "1 ids for 513 tokens, must be 2 of 512 tokens; if one id stands for another number of tokens, give --block-tokens",
        ),
    ],
)
def test_a_bad_mooncake_row_is_named_or_skipped(tmp_path, row, reason):
    """REFUSE gives line and reason and the remedy; SKIP keeps the others and lists it."""
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n\n{row}\n{GOOD}\n")

    with pytest.raises(ConfigError, match=r"bad\.jsonl:3: ") as refused:
        load_trace(str(path))
    trace = load_trace(str(path), on_bad_row=OnBadRow.SKIP)

    assert reason in str(refused.value)
    assert "--on-bad-row skip" in str(refused.value)
    assert [request.line for request in trace.requests] == [1, 4]
    assert list(trace.skipped) == [3]
    assert reason in trace.skipped[3]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:47,5", "2 columns, the header has 3"),
        ("yesterday,5,5", "TIMESTAMP: 'yesterday'"),
        ("2023-11-16 18:15:47,five,5", "ContextTokens: 'five'"),
        ("2023-11-16 18:15:47,5,0", "GeneratedTokens: '0'"),
        ("2023-11-16 18:15:40,5,5", "6.000 s before"),
    ],
)
def test_a_bad_azure_row_is_skipped_with_its_reason(tmp_path, row, reason):
    """The list of skipped rows says which line and why."""
    path = tmp_path / "bad.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n{row}\n")

    trace = load_trace(str(path), on_bad_row=OnBadRow.SKIP)

    assert len(trace.requests) == 1
    assert list(trace.skipped) == [3]
    assert reason in trace.skipped[3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n  \n", "the file is empty"),
        (b"{}\n\xff\xfe", r":2: byte 3 is not UTF-8"),
        (b"a,b\n1,2\n", "is none of JSON lines .* Azure's CSV .* BurstGPT's"),
        (
            b'[{"id":"a","conversations":[{"from":"human","value":"hi"}]}]',
            "as ShareGPT does.*--trace poisson:rate=2",
        ),
        (b'{"session_id": "s", "messages": [], "output_length": 5, "timestamp": 0}', "holds texts"),
        (b"Timestamp,Request tokens,Response tokens\n1,5,0\n", "only requests that failed"),
        (b"0,1.33,8.59,Weibull,0.375,0.396\n600,0,0,,0,0\n", "one of ServeGen's clients"),
        (b"600,0,0,,0,0\n", "one of ServeGen's clients"),
        (
            b'{"request_id": 0, "type": "text", "input_length": 61, "output_length": 9}\n',
            "requests have no times",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, content, message):
    """Empty, binary and unknown files each say what is wrong."""
    path = tmp_path / "trace"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        load_trace(str(path))


BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,276,693,Conversation log
118,GPT-4,1360,0,1360,API log
200,ChatGPT,185,215,400,Conversation log
"""
WITH_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0.0,2,1.2,ChatGPT,472,18,490,Conversation log
3.5,2,2.2,ChatGPT,1087,230,1317,Conversation log
"""
SPLITWISE = """request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size
0,2,0,0.5,1,374,44
1,2,0,4.25,1,396,109
"""
SERVEGEN = """request_id,timestamp,input_tokens,output_tokens
0,0.5,10,20
1,1.2,15,25
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,100,15
"""
AZURE_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
BARE = """{"timestamp": 0, "input_length": 6758, "output_length": 500}
{"timestamp": 3000, "input_length": 7322, "output_length": 490}
"""


@pytest.mark.parametrize(
    ("content", "trace_format", "rows", "skipped"),
    [
        (
            BURSTGPT,
            TraceFormat.BURSTGPT,
            [(5, 472, 18), (45, 1087, 230), (118, 417, 276), (200, 185, 215)],
            [5],
        ),
        (WITH_SESSIONS, TraceFormat.BURSTGPT, [(0, 472, 18), (3.5, 1087, 230)], []),
        (SPLITWISE, TraceFormat.SPLITWISE, [(0.5, 374, 44), (4.25, 396, 109)], []),
        (SERVEGEN, TraceFormat.SERVEGEN, [(0.5, 10, 20), (1.2, 15, 25)], []),
        (AZURE_2024, TraceFormat.AZURE, [(0, 2162, 5), (0.99007, 100, 15)], []),
        (AZURE_2023, TraceFormat.AZURE, [(0, 374, 44), (4.314579, 396, 109)], []),
        (BARE, TraceFormat.MOONCAKE, [(0, 6758, 500), (3, 7322, 490)], []),
    ],
)
def test_traces_that_people_have_are_read(tmp_path, content, trace_format, rows, skipped):
    """Both headers of BurstGPT, whose failed requests are left out and listed, Azure's two years, rows without ids."""
    path = tmp_path / "trace"
    path.write_bytes(content.encode())

    trace = load_trace(str(path))

    assert trace.format is trace_format
    found = [(each.arrival_s, each.input_tokens, each.output_tokens) for each in trace.requests]
    assert found == [pytest.approx(row) for row in rows]
    assert {each.block_ids for each in trace.requests} == {None}
    assert list(trace.skipped) == skipped
    assert not trace.is_batched


def test_turns_of_a_session_grow_by_what_went_before(tmp_path):
    """As AIPerf writes them: a turn is new text after its delay, and shares its history with the turn before it."""
    path = tmp_path / "aiperf.jsonl"
    path.write_text(
        '{"timestamp": 0, "session_id": "a", "input_length": 600, "output_length": 40, "delay": 0}\n'
        '{"session_id": "a", "input_length": 300, "output_length": 40, "delay": 500}\n'
        '{"timestamp": 200, "session_id": "b", "input_length": 10, "output_length": 4}\n'
    )

    first, other, second = load_trace(str(path)).requests

    assert [(each.line, each.arrival_s) for each in (first, other, second)] == [(1, 0), (3, 0.2), (2, 0.5)]
    assert (first.input_tokens, second.input_tokens) == (600, 600 + 40 + 300)
    assert second.block_ids[: len(first.block_ids)] == first.block_ids
    assert not set(other.block_ids) & set(second.block_ids)


@pytest.mark.parametrize("tokens", [16, 64, 512, 768, 1024])
def test_ids_of_any_size_share_what_they_shared_by_whole_512_tokens(tmp_path, tokens):
    """A prompt of 2,000 tokens and one that has its first 1,100 in common share two blocks of 512."""
    same = -(-1100 // tokens) if tokens < 512 else 1100 // tokens
    count = -(-2000 // tokens)
    rows = [list(range(count)), [*range(same), *range(1000, 1000 + count - same)]]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {at}, "input_length": 2000, "output_length": 1, "hash_ids": {ids}}}\n'
            for at, ids in enumerate(rows)
        )
    )

    one, two = (each.block_ids for each in load_trace(str(path), block_tokens=tokens).requests)

    shared = [left == right for left, right in zip(one, two, strict=True)]
    assert len(one) == 4
    assert shared == [at < same * tokens // 512 for at in range(4)]


def test_bailians_rows_have_seconds_and_ids_of_16_tokens(tmp_path):
    """As its authors state; no flag is needed."""
    path = tmp_path / "qwen.jsonl"
    ids = list(range(33))
    path.write_text(
        f'{{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,'
        f' "type": "text", "turn": 2, "hash_ids": {ids}}}\n'
    )

    trace = load_trace(str(path))

    assert (trace.format, trace.hash_tokens) == (TraceFormat.BAILIAN, 16)
    assert trace.requests == (TraceRequest(61.114, 521, 132, (0, 1), 1),)


def test_a_row_of_a_session_with_ids_is_complete_in_itself(tmp_path):
    """Its ids say what the prompt is made of; only its time may follow from the turn before it."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 10, "session_id": 1, "input_length": 600, "output_length": 40, "hash_ids": [1, 2]}\n'
        '{"session_id": 1, "delay": 5, "input_length": 700, "output_length": 40, "hash_ids": [1, 3]}\n'
    )

    assert load_trace(str(path)).requests == (
        TraceRequest(0.01, 600, 40, (1, 2), 1),
        TraceRequest(0.015, 700, 40, (1, 3), 2),
    )


def test_rows_of_a_table_become_a_trace():
    """In order of arrival, by whatever numbers the table holds; rows are counted from 1 as lines are."""
    rows = [
        {"arrival_s": 2, "input_tokens": 600.0, "output_tokens": 5, "block_ids": np.array([1, 2])},
        {"arrival_s": 0.5, "input_tokens": 7, "output_tokens": 3, "block_ids": float("nan"), "user": "x"},
    ]

    trace = trace_of_rows(rows, name="mine")

    assert (trace.name, trace.format, trace.skipped) == ("mine", TraceFormat.TABLE, {})
    assert trace.requests == (TraceRequest(0.5, 7, 3, None, 2), TraceRequest(2.0, 600, 5, (1, 2), 1))
    assert hash(trace) == hash(trace_of_rows(rows, name="mine"))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "the table has no row"),
        ([{"input_tokens": 5, "output_tokens": 5}], "row 0: arrival_s: Field required"),
        (
            [{"arrival_s": 0, "input_tokens": 600, "output_tokens": 5, "block_ids": [1]}],
            "1 ids for 600 tokens, must be 2",
        ),
    ],
)
def test_a_table_that_is_no_trace_is_refused(rows, said):
    """With the row and the column."""
    with pytest.raises(ConfigError, match=said):
        trace_of_rows(rows)


def test_batches_are_recognised_by_their_times():
    """The default spreading is for Mooncake's batches of 3 s, not for a trace whose rows have times of their own."""
    assert load_trace("mooncake").is_batched


def test_a_missing_file_names_the_built_in_traces(tmp_path):
    """A typing error in a built-in name looks like a missing file."""
    with pytest.raises(ConfigError, match=r"no such file.*there is: mooncake"):
        load_trace(str(tmp_path / "moonkake"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_trace(str(tmp_path))


def test_a_trace_without_a_usable_row_is_refused_even_when_skipping(tmp_path):
    """Replaying nothing is never what was meant."""
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n{}\n")

    with pytest.raises(ConfigError, match="none of its 2 rows can be used"):
        load_trace(str(path), on_bad_row=OnBadRow.SKIP)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    """Spreadsheets write one in front of a CSV."""
    path = tmp_path / "bom.csv"
    path.write_bytes(b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,5\n")

    assert load_trace(str(path)).requests == (TraceRequest(0.0, 5, 5, None, 2),)


def _request(tokens, ids, line=1):
    return TraceRequest(0.0, tokens, 1, ids, line)


@given(st.integers(1, 5000), st.integers(0, 10**9), st.booleans())
def test_a_prompt_has_four_bytes_a_token(tokens, seed, has_ids):
    """The simulated tokenizer counts exactly the trace's tokens, whatever the length."""
    ids = tuple(range(-(-tokens // 512))) if has_ids else None

    assert len(PromptMaker(seed).make(_request(tokens, ids))) == 4 * tokens


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=4)
)
def test_prompts_share_text_exactly_as_far_as_their_ids_agree(left, right):
    """Equal ids give equal blocks, different ids give different ones, wherever they stand."""
    maker = PromptMaker(3)
    one = maker.make(_request(512 * len(left), tuple(left)))
    two = maker.make(_request(512 * len(right), tuple(right)))

    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        block = slice(2048 * index, 2048 * (index + 1))
        assert (one[block] == two[block]) == (a == b)


def test_seeds_and_lines_give_other_texts():
    """Another seed starts a warm server cold; requests without ids are all different."""
    unique = PromptMaker(0)

    assert block_text(0, 1) != block_text(1, 1)
    assert unique.make(_request(50, None, line=1)) != unique.make(_request(50, None, line=2))
    assert unique.make(_request(50, None, line=1)) != PromptMaker(1).make(_request(50, None, line=1))
    assert unique.make(_request(50, None, line=1)) == PromptMaker(0).make(_request(50, None, line=1))


def test_the_text_is_the_same_in_every_process():
    """A second load generator, or a later run, sends the same bytes."""
    assert block_text(0, 0)[:16] == b"jiRI8zJCvxLtk+Nd"
