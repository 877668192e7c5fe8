"""From tried rows to a whole plan: strata, ranges, bounds, money, all by numbers made up here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.planning.forecast import (
    BUSY,
    OTHERS_CPU,
    Crew,
    EmptyShard,
    Group,
    Range,
    Sampled,
    forecast,
)
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.prices import Prices
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.planning.strata import MOST_STRATA, OTHER, draw, groups
from earmill.pipeline.sources.base import Item

EMPTY = EmptyShard(1000, {"commit": 0.01}, 0.01)
CREW = Crew(workers=1, threads=2, cores=2)


def row(number: int, seconds: float = 4.0, kind: str = "wav", rate: int = 32000) -> Item:
    size = round(rate * seconds)
    uri = f"/corpus/{number}.{kind}"
    return Item(f"{number}", uri, size=size, seconds=seconds, position=number)


def plan_of_rows(items: list[Item], rows_of_a_shard: int = 10) -> Plan:
    parts = range(0, len(items), rows_of_a_shard)
    shards = [
        Shard(f"{at:05d}", tuple(items[first : first + rows_of_a_shard]))
        for at, first in enumerate(parts)
    ]
    return Plan("p", "s", tuple(shards))


def tried(stratum: str, cpu_of_a_second: float, seconds: float = 40.0, **more: object) -> Group:
    """Ten rows that cost so much."""
    whole = Group(
        stratum,
        rows=10,
        bad={},
        planned_s=seconds,
        audio_s=seconds,
        cpu_s={"model": cpu_of_a_second * seconds, "commit": 0.01},
        publish_cpu_s=0.01,
        process_s=cpu_of_a_second * seconds / 2,
        publish_s=0.01,
        fetch_s=0.0,
        nbytes=round(500 * seconds) + 1000,
    )
    return replace(whole, **more)  # type: ignore[arg-type]


def sampled(*some: Group) -> Sampled:
    return Sampled(some, EMPTY, 0, 1.0, 2, "cpu", 1.0, 1.0)


def test_every_stratum_is_drawn_by_its_audio_and_a_seed_draws_the_same() -> None:
    items = [row(n) for n in range(180)] + [row(n, kind="mp3") for n in range(180, 200)]
    items += [row(200, seconds=500.0)]
    strata = draw(plan_of_rows(items), 20, seed=3, long_s=120.0)
    named = {stratum.name: stratum for stratum in strata.all}
    assert {name: one.rows for name, one in named.items()} == {
        ".wav, 16-33 kB/s": 180,
        ".mp3, 16-33 kB/s": 20,
        ".wav, 16-33 kB/s, long": 1,
    }
    assert [one.seconds for one in strata.all] == sorted((720.0, 80.0, 500.0), reverse=True)
    assert len(named[".wav, 16-33 kB/s"].drawn) == round(20 * 720 / 1300)
    assert len(named[".mp3, 16-33 kB/s"].drawn) == 4, "a small one has a spread, too"
    assert draw(plan_of_rows(items), 20, seed=3, long_s=120.0) == strata
    assert draw(plan_of_rows(items), 20, seed=4, long_s=120.0) != strata
    total_s = sum(sum(seconds.values()) for seconds in strata.by_shard)
    assert total_s == pytest.approx(sum(item.seconds or 0 for item in items))


def test_strata_beyond_the_most_are_one_and_keep_their_audio() -> None:
    items = [row(n, kind=f"x{n % 20}") for n in range(400)]
    strata = draw(plan_of_rows(items), 50, seed=0, long_s=120.0)
    assert len(strata.all) == MOST_STRATA and OTHER in {one.name for one in strata.all}
    assert sum(one.rows for one in strata.all) == 400
    assert {name for shard in strata.by_shard for name in shard} <= {o.name for o in strata.all}
    other = next(one for one in strata.all if one.name == OTHER)
    assert len({item.uri.rpartition(".")[2] for item in other.drawn}) > 1


def test_one_row_and_rows_without_size_or_seconds_are_drawn() -> None:
    alone = draw(plan_of_rows([row(0)]), 48, seed=0, long_s=120.0)
    assert [list(groups(stratum, 8)) for stratum in alone.all] == [[[row(0)]]]
    bare = [Item(f"{n}", f"hf:set#shard=0&row={n}") for n in range(3)]
    (stratum,) = draw(plan_of_rows(bare), 48, seed=0, long_s=120.0).all
    assert (stratum.name, stratum.rows, stratum.seconds) == ("no extension", 3, 30.0)


def test_a_long_row_is_a_group_and_few_rows_are_two_groups() -> None:
    items = [row(n, seconds=200.0) for n in range(5)]
    (long,) = draw(plan_of_rows(items), 10, seed=0, long_s=120.0).all
    assert long.is_long and [len(some) for some in groups(long, 8)] == [1] * 5
    (short,) = draw(plan_of_rows([row(n) for n in range(6)]), 6, seed=0, long_s=120.0).all
    assert [len(some) for some in groups(short, 8)] == [3, 3]


def test_equal_groups_make_the_sum_and_different_ones_a_range() -> None:
    items = [row(n) for n in range(200)]
    strata = draw(plan_of_rows(items), 20, seed=0, long_s=120.0)
    (name,) = (one.name for one in strata.all)
    alike = forecast(strata, sampled(*[tried(name, 0.005) for _ in range(2)]), CREW)
    whole_s, shards = 800.0, 20
    cpu_s = 0.005 * whole_s + 0.01 * shards
    assert alike.cpu_s.expected == pytest.approx(cpu_s * (1 + OTHERS_CPU))
    assert alike.stored_bytes.expected == pytest.approx(500 * whole_s + 1000 * shards)
    assert alike.parts == pytest.approx({"model": 4.0, "commit": 0.2})
    assert alike.bound_by == "cores"
    assert alike.work_s.expected == pytest.approx(cpu_s / (2 * BUSY), rel=0.02)

    one, other = tried(name, 0.004), tried(name, 0.006, nbytes=30000)
    apart = forecast(strata, sampled(one, other), CREW)
    assert apart.cpu_s.expected == pytest.approx(alike.cpu_s.expected)
    assert apart.cpu_s.high - apart.cpu_s.low > 2 * (alike.cpu_s.high - alike.cpu_s.low)
    assert apart.stored_bytes.high > 1.1 * apart.stored_bytes.expected


def test_copies_of_equal_files_are_neither_tried_nor_computed() -> None:
    items = [row(n) for n in range(200)]
    plan = plan_of_rows(items)
    half = replace(plan, copied=10)
    all_of_it, strata = (draw(each, 400, seed=0, long_s=120.0) for each in (plan, half))
    (stratum,) = strata.all
    assert (stratum.rows, stratum.seconds, strata.shards) == (100, 400.0, 20)
    assert {int(item.row_id) for item in stratum.drawn} == set(range(100))
    # A third of the CPU time of a row is that of writing it.
    some = sampled(*[tried(stratum.name, 0.006, publish_cpu_s=0.002 * 40 + 0.01)] * 2)
    whole, found = (forecast(each, some, CREW) for each in (all_of_it, strata))
    cpu_s = 0.006 * 400 + 0.002 * 400 + 0.01 * 20
    assert found.cpu_s.expected == pytest.approx(cpu_s * (1 + OTHERS_CPU))
    assert found.stored_bytes.expected == pytest.approx(whole.stored_bytes.expected)
    by_workers = (0.006 * 400 + 0.01 * 10) / (2 * BUSY)
    by_copiers = (0.002 * 400 + 0.01 * 10) / (2 * BUSY)
    assert found.work_s.expected == pytest.approx(by_workers + by_copiers, rel=0.01)
    assert sum(found.parts.values()) == pytest.approx(0.006 * 400 + 0.01 * 10)


def test_a_copy_whose_kind_no_computed_row_has_costs_what_others_do() -> None:
    items = [row(n, kind="wav" if n < 10 else "wave") for n in range(20)]
    strata = draw(replace(plan_of_rows(items), copied=1), 20, seed=0, long_s=120.0)
    (name,) = (one.name for one in strata.all)
    found = forecast(strata, sampled(*[tried(name, 0.005)] * 2), CREW)
    assert found.stored_bytes.expected == pytest.approx(2 * (500 * 40 + 1000))


def test_more_workers_of_one_machine_share_its_cores_and_of_others_do_not() -> None:
    strata = draw(plan_of_rows([row(n) for n in range(200)]), 20, seed=0, long_s=120.0)
    seen = sampled(tried(strata.all[0].name, 0.005), tried(strata.all[0].name, 0.005))
    one = forecast(strata, seen, Crew(1, 2, 2)).work_s.expected
    sharing = forecast(strata, seen, Crew(2, 2, 2)).work_s.expected
    apart = forecast(strata, seen, Crew(2, 2, 4)).work_s.expected
    assert sharing == pytest.approx(one, rel=0.05)
    assert apart == pytest.approx(one / 2, rel=0.05)


def test_what_is_done_one_by_one_bounds_the_time() -> None:
    strata = draw(plan_of_rows([row(n) for n in range(200)]), 20, seed=0, long_s=120.0)
    slow = tried(strata.all[0].name, 0.005, fetch_s=40.0)
    found = forecast(strata, sampled(slow, slow), CREW)
    assert found.bound_by == "fetching"
    assert found.work_s.expected == pytest.approx(800.0 / 2, rel=0.01)
    slow = tried(strata.all[0].name, 0.005, process_s=1.0, publish_s=39.01)
    found = forecast(strata, sampled(slow, slow), CREW)
    assert found.bound_by == "writing"


def test_bad_rows_are_a_share_with_a_range() -> None:
    strata = draw(plan_of_rows([row(n) for n in range(200)]), 20, seed=0, long_s=120.0)
    bad = tried(strata.all[0].name, 0.005, bad={"truncated": 2, "not_audio": 1})
    share = forecast(strata, sampled(bad, tried(strata.all[0].name, 0.005)), CREW).bad_share
    assert share.expected == pytest.approx(3 / 20)
    assert 0.02 < share.low < share.expected < share.high < 0.4
    good = forecast(strata, sampled(*[tried(strata.all[0].name, 0.005)] * 2), CREW).bad_share
    assert good.expected == 0.0 < good.high


def test_rows_that_all_failed_say_nothing() -> None:
    strata = draw(plan_of_rows([row(0)]), 1, seed=0, long_s=120.0)
    nothing = tried(strata.all[0].name, 0.0, audio_s=0.0)
    with pytest.raises(ValueError, match="expected audio in the rows"):
        forecast(strata, sampled(nothing), CREW)


def test_ranges() -> None:
    some = Range(9.9, 10.0, 10.1)
    assert some.at_least(0.1) == Range(9.0, 10.0, 11.0)
    assert some.at_least(0.001) == some
    assert some.plus(1).times(2) == Range(21.8, 22.0, 22.2)


def test_prices_are_read_checked_and_summed(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("{currency: EUR, core_hour: 0.04, put_per_1000: 0.005, storage_gb_month: 0.02}")
    prices = Prices.load(str(path))
    amounts = {"gpu_s": 9e9, "puts": 2000, "gets": 9e9, "stored_bytes": 5e9, "read_bytes": 9e9}
    assert prices.of(core_s=7200, **amounts) == pytest.approx(2 * 0.04 + 2 * 0.005 + 5 * 0.02)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("core_hours: 0.04", "core_hours: unknown key; did you mean 'core_hour'"),
        ("core_hour: -1", "core_hour: "),
        ("core_hour: dear", "core_hour: expected a number"),
        ("[0.04]", "expected a mapping of prices (currency, core_hour,"),
        ("currency: EUR", "expected at least one price above 0 (core_hour,"),
        ("core_hour: [", "prices.yaml"),
    ],
)
def test_a_wrong_price_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        Prices.load(str(path))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(SpecError, match=r"none\.yaml: there is no such price file"):
        Prices.load(str(tmp_path / "none.yaml"))
