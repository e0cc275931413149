"""How many values of mode adaptive were chosen by what they do to figures: a policy that can be predicted has few."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "bench" / "planner"

MOST = 20
"""This many numbers were left when they were last counted, each a constant; more than 20 cannot be kept in mind. It is lowered with them, never raised."""


@pytest.fixture
def chosen(monkeypatch):
    """The bench's list of values; it is a folder of scripts."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import chosen

    yield chosen
    sys.modules.pop("chosen", None)


def test_no_more_values_are_chosen_than_were_counted(chosen):
    """Each needs figures of the scoreboard that show what it buys; bounds, which change no decision of a usual fleet, do not count."""
    found = [value.label for value in chosen.chosen_values()]
    assert found, "nothing says that it was chosen"
    assert len(set(found)) == len(found), "a label stands for two values"
    assert len(found) <= MOST, found


def test_values_are_counted_where_their_words_say_so(chosen):
    """Two above one docstring are two, each number of a constant is one; what is measured, refers to another or stands apart is none."""
    source = (
        'E = 0\n\nA = 1\nB: float = 6 * 0.5\n"""Chosen: as said."""\n\nC = 3\n"""Measured."""\nD = 4\n\n'
        'F = (1, 3)\n"""Chosen."""\nG = {Role.DECODE: 0.7}\nH = Stabilization(sigmas=A, kv=0.45)\n"""Chosen."""\n'
    )
    found = [(value.label, value.number) for value in chosen.values_in(source)]
    assert found == [
        *(("A", 1), ("B", 3.0), ("F.0", 1), ("F.1", 3)),
        *(("G.Role.DECODE", 0.7), ("H.kv", 0.45)),
    ]


@pytest.mark.parametrize(
    ("name", "number", "factor", "expected"),
    [
        ("TAU_S", 40.0, 2, 80.0),
        ("SHARE", 0.7, 2, 1.0),
        ("SHARE", 0.7, 0.5, 0.35),
        ("AHEAD_SIGMAS", 0.5, 4, 2.0),
        ("TURNS", 3, 0.5, 2),
        ("TURNS", 1, 0.25, 1),
    ],
)
def test_a_changed_value_stays_in_its_range(chosen, name, number, factor, expected):
    """A share is at most all, a count is whole and at least one."""
    changed = chosen.Value("", name, "", number).times(factor)
    assert changed == expected
    assert type(changed) is type(expected)


def test_a_value_is_replaced_alone(chosen):
    """What a bench compiles differs in one number, and what is derived from it follows."""
    source = 'A = (1, 3)\nB = 2\n"""Chosen."""\nC = A[1] + B\n'
    values = {value.label: value for value in chosen.values_in(source)}
    names: dict[str, object] = {}
    exec(compile(chosen.with_number(source, values["A.1"], 7), "", "exec"), names)
    assert (names["A"], names["B"], names["C"]) == ((1, 7), 2, 9)


@pytest.fixture
def values(chosen, monkeypatch):
    """The bench that runs them changed."""
    import values

    yield values
    sys.modules.pop("values", None)


def test_what_is_derived_from_a_changed_value_follows(chosen, values):
    """A module is found with another number in it, and the one that the planner imported stays as it is."""
    from penstock_planner.decide import demand
    from penstock_planner.decide.demand import load

    value = next(each for each in chosen.chosen_values() if each.label == "LEVEL_TAU_S")
    finder = values.Changed(value, 12.0)
    spec = finder.find_spec(load.__name__, demand.__path__)
    changed = module_from_spec(spec)
    spec.loader.exec_module(changed)
    assert changed.LEAST_BUSY_S == changed.LEVEL_TAU_S == 12.0
    assert value.number == load.LEVEL_TAU_S
    assert finder.find_spec("penstock_planner.decide.policies.adaptive.policy", None) is None


def test_a_table_names_the_options_that_make_it_again(values):
    """Cases and values, as a reader gives them."""
    assert values.repeated("flash,recurring:2", None) == "--cases flash,recurring:2"
    assert values.repeated("flash", "HALF,WAIT_S") == "--cases flash --values HALF,WAIT_S"


def test_values_are_shown_by_what_they_buy(chosen, values):
    """The dearest to do without is first: by the cheaper of its two changes, a fifth of the GPU-hours a point below 99%."""
    first, second = chosen.Value("m", "A_S", "", 2.0), chosen.Value("m", "B_S", "", 4.0)

    def figures(in_time, gpu_hours):
        return {"in_time": in_time, "gpu_hours": gpu_hours}

    found = {
        values.Run("flash"): figures(0.99, 10.0),
        values.Run("flash", "A_S", 1.0): figures(0.98, 10.0),
        values.Run("flash", "A_S", 4.0): figures(0.99, 10.1),
        values.Run("flash", "B_S", 2.0): figures(0.995, 11.0),
        values.Run("flash", "B_S", 8.0): figures(0.99, 11.0),
    }
    assert [run for run in values.runs_of([first, second], ["flash"]) if run not in found] == []
    rows = values.table([first, second], ["flash"], found)[3:]
    assert [row.split(" | ")[0] for row in rows] == ["| B_S", "| B_S", "| A_S", "| A_S"]
    assert rows[2] == "| A_S | 2 | 1 | 98.00% 10.00 | -1.00 points, +20.0% | +20.0% |"
