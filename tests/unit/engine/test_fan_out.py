"""Which rank reads from which, and when a prompt has been read by all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.lease import Read, ReadProgress, reads_of


@pytest.mark.parametrize(
    ("source", "reader", "expected"),
    [
        (1, 1, [(0, 0, 1)]),
        (4, 2, [(0, 0, 1), (1, 0, 1), (2, 1, 1), (3, 1, 1)]),
        (2, 4, [(0, 0, 2), (0, 1, 2), (1, 2, 2), (1, 3, 2)]),
        (1, 2, [(0, 0, 2), (0, 1, 2)]),
    ],
)
def test_ranks_are_paired(source, reader, expected):
    """Rank read from, rank that reads, readers of the former; the document's example is prefill 4, decode 2."""
    reads = list(reads_of("a", source, reader))
    assert [(each.rank, each.reader, each.readers) for each in reads] == expected


def test_degrees_that_do_not_divide_are_refused():
    """Three ranks and two have no whole shares."""
    with pytest.raises(ValueError, match="one must divide the other"):
        list(reads_of("a", 3, 2))


def test_a_read_that_comes_twice_counts_once():
    """Else a rank would be freed while its second reader still reads."""
    progress = ReadProgress(1)
    assert not progress.note(Read("a", 0, 0, 2))
    assert not progress.note(Read("a", 0, 0, 2))
    assert progress.note(Read("a", 0, 1, 2))


powers = st.sampled_from([1, 2, 4, 8])


@given(powers, powers, st.randoms(use_true_random=False))
def test_all_reads_in_any_order_end_it_with_the_last(source, reader, random):
    """Every rank is read, and only the last notification frees the prompt."""
    reads = list(reads_of("a", source, reader))
    assert {each.rank for each in reads} == set(range(source))
    assert {each.reader for each in reads} == set(range(reader))
    random.shuffle(reads)
    progress = ReadProgress(source)
    assert [progress.note(each) for each in reads] == [False] * (len(reads) - 1) + [True]
