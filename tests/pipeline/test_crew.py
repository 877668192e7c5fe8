"""Drivers that share an output: each shard is one member's, and what a dead one had is taken on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from earmill.pipeline.common.errors import LockedError
from earmill.pipeline.dataset import driver_lock
from earmill.pipeline.dataset.commit_record import Committed, commits_as
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.driver_lock import (
    STALE_S,
    UNFENCED,
    BlockClaims,
    DriverLock,
    DriverMembership,
    LockHolder,
    as_seen_now,
    clear_claims,
    live_crew,
)
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.driver.sharing import SharingPolicy
from earmill.pipeline.operations.run_job import close
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CREW, commit_path
from tests.pipeline.outputs import s3_server, small_dataset
from tests.waiting import DEADLINE_S

PLAN = "0" * 16
SHARDS = [f"{index:05d}" for index in range(90)]


@pytest.fixture(autouse=True)
def _blocks_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_lock, "BLOCKS", 30)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.open(tmp_path)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += driver_lock.LOOK_EVERY_S
        return self.now


def claims(layout: Layout, run_id: str, shards: list[str] = SHARDS, **options: Any) -> BlockClaims:
    done = options.pop("done", set())
    return BlockClaims(layout, PLAN, shards, done, run_id=run_id, clock=Clock(), **options)


def everything(mine: BlockClaims) -> list[str]:
    """What a member gets until there is nothing left to claim."""
    found = []
    while got := mine.next():
        found += got
    return found


def commit(layout: Layout, shards: list[str]) -> None:
    for shard in shards:
        layout.write_bytes(commit_path(shard), b"{}")


def test_members_that_race_for_claims_get_every_shard_once(layout: Layout) -> None:
    """Each begins elsewhere; the last blocks are fought for."""
    members = [DriverMembership(layout, run_id=f"m{index}") for index in range(3)]
    mine = [claims(layout, f"m{index}", start=index / 4) for index in range(3)]
    begun = Barrier(3)

    def race(mine: BlockClaims) -> list[str]:
        first = mine.next() or []
        begun.wait(DEADLINE_S)  # else whoever comes first may have everything before others begin
        return first + everything(mine)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(race, mine))
    assert sorted(shard for one in found for shard in one) == SHARDS
    assert all(found), "nobody was left without"
    # Claimed shards are not committed yet, so the other members wait for them.
    assert mine[0].next() == []
    commit(layout, SHARDS)
    assert mine[0].next() is None
    for member in members:
        member.release()
    assert layout.list(CREW) == []


def test_what_a_member_that_left_or_died_had_is_claimed_by_one_of_the_others(
    layout: Layout,
) -> None:
    for gone in ("left", "died"):
        shards = [f"{index:05d}" for index in range(8)]
        dead = LockHolder.here(gone)
        if gone == "died":  # it lives by its process, but gives no sign of it
            stale = as_seen_now(dead).replace(
                str(int(time.time())).encode(), str(int(time.time() - 2 * STALE_S)).encode()
            )
            layout.write_bytes(f"{CREW}/died.json", stale)
        first = claims(layout, gone, shards)
        assert first.next() == shards[:1] and first.next() == shards[1:2]
        commit(layout, shards[:1])
        with DriverMembership(layout, run_id="a"), DriverMembership(layout, run_id="b"):
            others = [claims(layout, name, shards, done={shards[0]}) for name in "ab"]
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(everything, others))
            assert sorted(shard for one in found for shard in one) == shards[1:]
        clear_claims(layout)
        layout.delete("commits")
        assert layout.list("claims") == []
        # A process that lives may wake: its membership goes with who needs the output alone.
        assert layout.list(CREW) == ([f"{CREW}/died.json"] if gone == "died" else [])
        with DriverLock(layout):
            assert layout.list(CREW) == []


def test_a_member_wakes_and_finds_its_claim_superseded_but_does_no_harm(layout: Layout) -> None:
    """It was frozen: another has its shard, and a third one cannot get it as well."""
    frozen = claims(layout, "frozen", ["00000"])
    assert frozen.next() == ["00000"]
    with DriverMembership(layout, run_id="second"), DriverMembership(layout, run_id="third"):
        assert claims(layout, "second", ["00000"]).next() == ["00000"]
        assert claims(layout, "third", ["00000"]).next() == []
        assert frozen.next() is None, "for itself it has it still: commits decide"


def test_who_needs_the_output_alone_is_refused_while_others_share_it(layout: Layout) -> None:
    with DriverMembership(layout, run_id="member"):
        assert list(live_crew(layout)) == ["member"]
        with pytest.raises(LockedError, match=r"run member, last sign of life.*--join"):
            DriverLock(layout)
        assert not layout.exists("driver.json")
        with DriverLock(layout, shares=True, alone=False):
            pass
    with DriverLock(layout):
        with pytest.raises(LockedError, match="used by one driver alone"):
            DriverMembership(layout)
        assert layout.list(CREW) == []
    with DriverLock(layout, shares=True), DriverMembership(layout):
        pass


@pytest.mark.parametrize("joins", [False, True], ids=["alone", "joining"])
def test_claims_of_a_member_that_was_killed_at_the_end_go_with_the_next_run(
    tmp_path: Path, joins: bool
) -> None:
    """It had written the index and not yet cleared up; another had not heard of that."""
    layout = small_dataset(tmp_path / "out")
    finalise(layout)
    claims(layout, "killed", SHARDS[:3]).next()
    layout.write_bytes(
        f"{CREW}/killed.json", as_seen_now(replace(LockHolder.here("killed"), pid=0))
    )
    licenses = SimpleNamespace(to_dict=dict)
    job: Any = SimpleNamespace(layout=layout, dataset=read_dataset(layout), fence=UNFENCED)
    job.spec = SimpleNamespace(licenses=licenses)
    close(job, SharingPolicy(joins=joins), commits_as(layout, Committed.of), anew=False)
    assert layout.list("claims") == [] and layout.list(CREW) == []


def test_claims_on_a_store_are_created_by_one() -> None:
    with s3_server() as options:
        layout = Layout.open("s3://out/set", options)
        with DriverMembership(layout, run_id="a"), DriverMembership(layout, run_id="b"):
            first, second = claims(layout, "a", SHARDS[:3]), claims(layout, "b", SHARDS[:3])
            assert (first.next(), second.next()) == (["00000"], ["00001"])
            assert sorted(everything(first) + everything(second)) == ["00002"]
