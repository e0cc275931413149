"""Made-up workloads: their moments, their rates over time, their prefixes, and that they say what they are."""

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.workload.synthetic import Process, SyntheticSpec, arrival_times, parse_synthetic, synthesise


def rng():
    """A generator of one seed."""
    return np.random.default_rng(0)


@pytest.mark.parametrize(
    ("spec", "cv"),
    [
        (SyntheticSpec(Process.POISSON, rate=4.0, count=20_000), 1.0),
        (SyntheticSpec(Process.GAMMA, rate=4.0, count=20_000, cv=3.0), 3.0),
        (SyntheticSpec(Process.GAMMA, rate=4.0, count=20_000, cv=0.5), 0.5),
    ],
)
def test_gaps_have_the_mean_and_variation_asked_for(spec, cv):
    """Gamma at a CV of 1 would be Poisson."""
    gaps = np.diff(arrival_times(spec, rng()))

    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert (gaps >= 0).all()


def test_a_sine_swings_about_its_mean():
    """Amplitude 0.8: the quarter at the crest has far more arrivals than the one in the trough."""
    spec = SyntheticSpec(Process.SINE, rate=10.0, count=20_000, amplitude=0.8, period_s=100.0)

    phase = np.array(arrival_times(spec, rng())) % 100.0
    crest, trough = ((phase > a) & (phase < a + 25) for a in (12.5, 62.5))

    assert crest.sum() / trough.sum() == pytest.approx((1 + 0.8 * 0.9) / (1 - 0.8 * 0.9), rel=0.15)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("ramp:rate=4,peak=3,step_s=100,step_length_s=200,duration_s=400", (4, 6, 10, 12)),
        ("step:rate=4,peak=3,step_s=100,step_length_s=100,every_s=200,duration_s=500", (4, 12, 4, 12, 4)),
        ("sawtooth:rate=4,peak=5,period_s=400,duration_s=800", (6, 10, 14, 18, 6, 10, 14, 18)),
        ("day:rate=4,peak=3,period_s=800,step_length_s=100,duration_s=800", (4, 4, 8, 12, 12, 12, 8, 4)),
    ],
)
def test_changing_rates_are_as_asked(text, counts):
    """Requests/s of each 100 s: a line up, a step that comes again, teeth, a night, a day and the next night."""
    times = np.array(arrival_times(parse_synthetic(text), rng()))

    found = [((times >= 100 * i) & (times < 100 * i + 100)).sum() / 100 for i in range(len(counts))]
    assert found == [pytest.approx(each, rel=0.2) for each in counts]
    assert times.max() < 100 * len(counts)


def test_bursts_have_the_mean_and_variation_asked_for():
    """On and off at a CV of 13, as in Azure's code trace."""
    spec = SyntheticSpec(Process.BURSTS, rate=4.0, count=300_000, cv=13.0, peak=10.0)

    gaps = np.diff(arrival_times(spec, rng()))

    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(13, rel=0.1)


def test_regimes_jump_between_levels_and_hold_them():
    """Levels between 1 and 8/s, each for 200 s in the mean: half of the neighbouring minutes differ little."""
    text = "regimes:rate=1,peak=8,step_length_s=200,duration_s=40000"

    times = np.array(arrival_times(parse_synthetic(text), rng()))
    rate = np.bincount((times // 50).astype(int)) / 50

    assert times.size / 40_000 == pytest.approx((8 - 1) / np.log(8), rel=0.15)
    assert np.percentile(rate, [1, 99]) == pytest.approx([1.0, 8.0], rel=0.25)
    assert np.median(np.abs(np.diff(rate))) < 0.6 < np.percentile(np.abs(np.diff(rate)), 90)


def test_tenants_are_on_and_off_and_share_the_mean_rate():
    """Ten of them, each on an eighth of the time: often two or none of them send."""
    text = "tenants:rate=2,tenants=10,peak=8,step_length_s=100,duration_s=200000"

    times = np.array(arrival_times(parse_synthetic(text), rng()))
    of_minute = np.bincount((times // 60).astype(int)) / 60

    assert times.size / 200_000 == pytest.approx(2.0, rel=0.2)
    assert of_minute.std() / of_minute.mean() > 0.6


def test_a_shift_changes_the_lengths_from_its_time_on():
    """Prompts a quarter as long, answers four times as long."""
    text = "constant:rate=1,count=4,input_tokens=800,output_tokens=20,length_cv=0"
    made = synthesise(parse_synthetic(f"{text},shift_s=2,shift_input=0.25,shift_output=4"), rng())

    assert [(r.input_tokens, r.output_tokens) for r in made] == [(800, 20)] * 2 + [(200, 80)] * 2


def test_lengths_shift_back_and_forth():
    """Agents for two seconds, chats for two, agents again."""
    text = "constant:rate=1,count=7,input_tokens=800,output_tokens=20,length_cv=0"
    made = synthesise(
        parse_synthetic(f"{text},shift_s=2,shift_every_s=2,shift_input=0.25,shift_output=4"), rng()
    )

    assert [r.input_tokens for r in made] == [800, 800, 200, 200, 800, 800, 200]


def test_prompts_drift_to_their_last_length_and_answers_stay():
    """Three times as long at the last arrival, twice half-way."""
    text = "constant:rate=1,count=5,input_tokens=800,output_tokens=20,length_cv=0,drift_input=3"
    made = synthesise(parse_synthetic(text), rng())

    assert [(r.input_tokens, r.output_tokens) for r in made] == [(800 + 400 * n, 20) for n in range(5)]


def test_a_week_has_work_days_nights_with_a_batch_a_holiday_and_a_weekend():
    """Requests by hour: Monday's noon, two in the night, the quiet days' share, and batches that are not all at one minute."""
    spec = parse_synthetic("week:rate=0.02,peak=20,step_length_s=7200,duration_s=604800")
    times = np.array(arrival_times(spec, rng()))
    by_hour = np.bincount((times // 3600).astype(int), minlength=168).reshape(7, 24)

    work = by_hour[[0, 1, 2, 4], 10:18].mean()
    assert work == pytest.approx(3600 * 0.02 * (1 + 19 * 2 / 3), rel=0.2)
    assert by_hour[[3, 5, 6], 11:18].mean() == pytest.approx(work / 6, rel=0.4)
    assert by_hour[:, 1:3].sum(axis=1).min() > 200, "a batch each night"
    batches = [times[(times > n * 86400 + 5400) & (times < n * 86400 + 11400)] % 86400 for n in range(7)]
    begins = [float(np.percentile(each, 20)) for each in batches]
    assert max(begins) - min(begins) > 300


def test_lengths_are_cut_and_have_their_mean():
    """Log-normal with a mean of 2,000; none above the longest, none below one token."""
    spec = SyntheticSpec(count=20_000, input_tokens=2000, max_tokens=30_000, length_cv=1.5, output_tokens=100)

    made = synthesise(spec, rng())

    assert np.mean([r.input_tokens for r in made]) == pytest.approx(2000, rel=0.06)
    assert max(r.input_tokens for r in made) <= 30_000
    assert min(r.output_tokens for r in made) >= 1


def test_constant_lengths_are_constant():
    """A CV of 0 draws nothing."""
    made = synthesise(SyntheticSpec(count=50, input_tokens=700, length_cv=0.0, output_tokens=9), rng())

    assert {(r.input_tokens, r.output_tokens, len(r.block_ids)) for r in made} == {(700, 9, 2)}


def test_shared_prefixes_are_as_popular_as_asked():
    """Half the requests begin with one of four prefixes of two blocks, the first the most popular."""
    spec = SyntheticSpec(
        count=8000, share=0.5, prefixes=4, prefix_tokens=1024, input_tokens=4096, length_cv=0.0
    )

    firsts = [r.block_ids[0] for r in synthesise(spec, rng())]
    shared = [first for first in firsts if first < 8]

    assert len(shared) / len(firsts) == pytest.approx(0.5, abs=0.02)
    assert sorted(set(shared)) == [0, 2, 4, 6]
    assert shared.count(0) / len(shared) == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4), abs=0.03)
    assert len(set(firsts) - {0, 2, 4, 6}) == len(firsts) - len(shared)


def test_a_traces_requests_arrive_at_a_processes_times_and_again_with_blocks_of_their_own():
    """The packaged trace has 608; its 609th is the first one's twin, which finds nothing of it in a cache."""
    spec = parse_synthetic("constant:rate=2,count=609,requests=mooncake,max_tokens=5000,output_tokens=80")
    made = synthesise(spec, np.random.default_rng(0))
    first, last = made[0], made[-1]
    assert (first.input_tokens, first.output_tokens, len(first.block_ids)) == (5000, 80, 10)
    assert (last.arrival_s, last.input_tokens) == (304.0, 5000)
    assert not set(last.block_ids) & {block for each in made[:-1] for block in each.block_ids}
    assert spec.name.startswith("synthetic constant rate=2")


def test_the_name_says_synthetic():
    """And what differs from the default."""
    spec = parse_synthetic("gamma:rate=4,cv=2.5,count=100")

    assert spec == SyntheticSpec(Process.GAMMA, rate=4.0, cv=2.5, count=100)
    assert spec.name == "synthetic gamma rate=4 count=100 cv=2.5"
    assert parse_synthetic("mooncake") is None
    assert parse_synthetic("poisson") == SyntheticSpec()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson:speed=3", "unknown key 'speed'"),
        ("poisson:count=1.5", "count='1.5' is not a number of its kind"),
        ("poisson:rate=0", "rate=0.0 must be finite and above 0"),
        ("sine:amplitude=2", "amplitude=2.0 must be finite and at least 0 and at most 1"),
        ("poisson:rate=inf", "rate=inf"),
        ("poisson:rate", "rate=''"),
        ("poisson:duration_s=0", "duration_s=0.0 must be above 0"),
        ("poisson:shift_s=-1", "shift_s=-1.0 must be at least 0"),
        ("poisson:shift_every_s=0", "shift_every_s=0.0 must be above 0"),
        ("bursts:cv=0.5", "cv=0.5 must be above 1 for bursts"),
        ("day:step_length_s=300", "period_s=600.0 must be at least four times step_length_s=300"),
    ],
)
def test_bad_specs_are_refused_with_their_key(text, message):
    """Key, value and bound."""
    with pytest.raises(ConfigError, match=message):
        parse_synthetic(text)


def test_a_duration_before_the_first_arrival_is_refused():
    """An empty workload has no result."""
    with pytest.raises(ConfigError, match="ends before the first arrival"):
        synthesise(SyntheticSpec(rate=0.001, duration_s=1.0), rng())


def test_same_seed_same_requests():
    """The generator is the only source of chance."""
    spec = SyntheticSpec(count=100, share=0.5)

    assert synthesise(spec, rng()) == synthesise(spec, rng())
