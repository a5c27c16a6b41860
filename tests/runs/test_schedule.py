"""The schedule: against a table of what needs what, whatever the order in which work is taken and comes back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import (
    blocks_by_shard,
    choices,
    finer_by_shard,
    planned,
    some_selected,
    spans,
    volume,
    voxels_of_blocks,
    voxels_of_shards,
)

from volpipe.blockwise.stage import Schedule, Stage, Unit
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection
from volpipe.runs.schedule import RunSchedule

MANY = settings(max_examples=60)


@dataclass
class Table:
    """All units of a plan and what each needs, by brute force."""

    selection: Selection
    needs: dict[Unit, set[Unit]] = field(default_factory=dict)
    readers: dict[Unit, set[Unit]] = field(default_factory=dict)  # of each discard: who must be done before

    def __post_init__(self) -> None:
        plan = self.selection.plan
        stored = plan.mode == "stored"
        active = some_selected(self.selection, [voxels_of_blocks(plan, axis) for axis in range(3)])
        shards = [voxels_of_shards(n, s) for n, s in zip(plan.out_shape, plan.shard, strict=True)]
        by_shard = dict(enumerate(blocks_by_shard(plan)))
        by_shard = {shard: by_shard[shard] for shard in some_selected(self.selection, shards)}
        for block in active:
            if stored:
                self.needs["factor", block] = set()
                self.readers["discard windows", block] = {("infer", block)}
            self.needs["infer", block] = {("factor", block)} if stored else set()
        writers: dict[int, Unit] = {}
        for shard, blocks in by_shard.items():
            if len(blocks) == 1:
                writers[shard] = ("infer", blocks[0])
                continue
            writers[shard] = ("reassemble", shard)
            self.needs["reassemble", shard] = {("infer", block) for block in blocks if block in active}
            for block in active.intersection(blocks):
                corner, reach = plan.core_start(block), plan.sum_box(block)
                for part, region in enumerate(plan.sum_parts):
                    if share_a_voxel(plan.shards().box(shard), reach, region.shift(corner)):
                        self.readers.setdefault(("discard sum", 4 * block + part), set()).add(("reassemble", shard))
        for level in range(1, len(plan.factors)):
            name = f"pyramid {level}"
            below, writers = writers, {}
            for shard, finer in enumerate(finer_by_shard(plan, level)):
                if below.keys() & finer:
                    self.needs[name, shard] = {below[i] for i in finer if i in below}
                    writers[shard] = (name, shard)
        self.reassembled: dict[Unit, list[tuple[Unit, set[Unit]]]] = {}
        for shard, needs in self.needs.items():
            for unit in needs if shard[0] == "reassemble" else ():
                self.reassembled.setdefault(unit, []).append((shard, needs))

    def possible_without(self, broken: Iterable[Unit]) -> set[Unit]:
        """Return what can be done where the `broken` units cannot."""
        possible: set[Unit] = set()
        for unit, needs in self.needs.items():  # stages follow one another in the table
            if unit not in broken and needs <= possible:
                possible.add(unit)
        return possible


def by_stage(units: Iterable[Unit]) -> Iterator[dict[str, list[int]]]:
    """Yield `units` as a schedule resumes them."""
    return ({name: [unit]} for name, unit in units)


def share_a_voxel(*boxes: Box) -> bool:
    return all(max(box.start[axis] for box in boxes) < min(box.stop[axis] for box in boxes) for axis in range(3))


@dataclass
class Simulation:
    """Workers that take units of any stage and finish them in any order; each step is checked against the table."""

    table: Table
    schedule: RunSchedule
    random: random.Random
    broken: frozenset[Unit] = frozenset()
    done: set[Unit] = field(default_factory=set)
    attempts: dict[Unit, int] = field(default_factory=dict)
    running: list[Unit] = field(default_factory=list)

    def run(self, most_steps: int = 10**9) -> None:
        """Go on until nothing can start and nothing runs, or for some steps."""
        for _ in range(most_steps):
            if self.running and self.random.random() < 0.5:
                self.come_back(self.running.pop(self.random.randrange(len(self.running))))
            elif not self.take() and not self.running:
                return

    def take(self) -> bool:
        """Let some stage start something; return whether any could."""
        for stage in self.random.sample(self.schedule.stages, len(self.schedule.stages)):
            units = self.schedule.take(stage, most := self.random.randint(1, 4))
            assert len(units) <= most
            for unit in units:
                self.start((stage.name, unit))
            if units:
                return True
        return False

    def start(self, unit: Unit) -> None:
        assert unit not in self.running
        assert unit not in self.done
        if unit[0].startswith("discard"):
            assert self.table.readers[unit] <= self.done
        else:
            assert self.table.needs[unit] <= self.done
        self.running.append(unit)
        begun = {block for name, block in (*self.done, *self.running) if name == "factor"}
        infer = self.schedule.infer
        seen = {block for name, block in self.done if name == "infer"} | infer.failed
        if infer.num_held:  # blocks that this session leaves alone may have windows of an earlier one
            seen |= {n for n in begun if infer.taken[n] and ("infer", n) not in self.running and n not in infer.ready}
        assert len(begun - seen) <= self.schedule.most_waiting

    def worked(self) -> set[Unit]:
        return {unit for unit in self.done if not unit[0].startswith("discard")}

    def come_back(self, unit: Unit) -> None:
        """Finish `unit`, or fail it: twice to be tried again, then for good."""
        stage = self.schedule.by_name[unit[0]]
        self.attempts[unit] = self.attempts.get(unit, 0) + 1
        if unit in self.broken and self.attempts[unit] > 2:
            stage.failed.add(unit[1])
        elif unit in self.broken or (self.attempts[unit] == 1 and self.random.random() < 0.1):
            stage.give_back(unit[1])
        else:
            for shard in self.closed_by(unit):
                self.done.add(shard)
                self.schedule.finish(self.schedule.reassemble, shard[1])
            self.done.add(unit)
            self.schedule.finish(stage, unit[1])

    def closed_by(self, unit: Unit) -> list[Unit]:
        """Return some of the shards that a block may finish, since it is the last that they need."""
        return [
            shard
            for shard, needs in self.table.reassembled.get(unit, ())
            if shard not in self.broken
            if needs - self.done == {unit} and max(needs) == unit and self.random.random() < 0.5
        ]


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    selection = draw(choices(longest=14))
    schedule = RunSchedule(selection.plan, selection, most_waiting=draw(st.integers(1, 5)))
    return Simulation(Table(selection), schedule, random.Random(draw(st.integers(0, 2**32))))


@MANY
@given(simulations())
def test_all_is_done_once_and_in_order_and_scratch_goes_when_nobody_needs_it(simulation: Simulation) -> None:
    assert not simulation.schedule.is_complete
    simulation.run()
    assert simulation.done == {*simulation.table.needs, *simulation.table.readers}
    assert simulation.schedule.is_complete
    assert simulation.schedule.missing({}) == []
    assert all(stage.num_left == 0 for stage in simulation.schedule.shown)


@pytest.mark.long
@MANY
@given(simulations(), st.integers(0, 200), st.integers(0, 60))
def test_a_resumed_run_does_what_is_left_and_nothing_twice(simulation: Simulation, first: int, second: int) -> None:
    table, journal = simulation.table, list[Unit]()
    for steps in (first, second, 10**9):
        schedule = RunSchedule(table.selection.plan, table.selection, most_waiting=simulation.schedule.most_waiting)
        simulation.random.shuffle(journal)
        schedule.resume(by_stage(journal))
        session = Simulation(table, schedule, simulation.random, done=set(journal))
        session.run(steps)
        assert set(session.attempts).isdisjoint(journal)
        journal = sorted(session.worked())
    assert set(journal) == set(table.needs)
    assert schedule.is_complete


@MANY
@given(simulations(), st.data())
def test_what_fails_for_good_keeps_back_what_needs_it_and_nothing_else(
    simulation: Simulation, data: st.DataObject
) -> None:
    units = sorted(simulation.table.needs)
    simulation.broken = frozenset(data.draw(st.lists(st.sampled_from(units), max_size=6)))
    simulation.run()
    possible = simulation.table.possible_without(simulation.broken)
    assert simulation.worked() == possible
    for discard in simulation.done - possible:
        assert simulation.table.readers[discard] <= possible
    met = {unit for unit in simulation.broken if simulation.table.needs[unit] <= possible}
    failed = {(stage.name, unit) for stage in simulation.schedule.shown for unit in stage.failed}
    assert failed == met
    kept_back = [(stage.name, unit) for stage, unit in simulation.schedule.kept_back()]
    missing = simulation.schedule.missing(dict.fromkeys(failed, "it is bad"))
    assert {(part.stage, part.unit) for part in missing[: len(failed)]} == failed
    assert [(part.stage, part.unit) for part in missing[len(failed) :]] == kept_back
    assert set(kept_back) == {unit for unit in simulation.table.needs if unit not in possible | met}
    assert len(set(kept_back)) == len(kept_back)
    assert simulation.schedule.is_complete == (not simulation.broken)


@MANY
@given(simulations(), st.integers(0, 100), st.data())
def test_a_limited_session_computes_what_its_box_needs_and_the_next_one_the_rest(
    simulation: Simulation, before: int, data: st.DataObject
) -> None:
    table, plan = simulation.table, simulation.table.selection.plan
    box = Box(*zip(*(data.draw(spans(n)) for n in plan.out_shape), strict=True))
    simulation.run(before)
    journal = sorted(simulation.worked())
    limited = RunSchedule(plan, table.selection, most_waiting=simulation.schedule.most_waiting)
    limited.resume(by_stage(journal))
    limited.limit(box)
    session = Simulation(table, limited, simulation.random, done=set(journal))
    session.run()
    touched = set(filter(table.selection.is_unwritten, shards_touched(plan, box)))
    needed = {block for shard in touched for block in blocks_by_shard(plan)[shard]}
    computed = {unit for name, unit in session.worked() - set(journal) if name in ("factor", "infer")}
    assert computed <= needed
    assert {("infer", block) for block in needed} & table.needs.keys() <= session.worked()
    assert {("reassemble", shard) for shard in touched} & table.needs.keys() <= session.worked()
    assert limited.infer.num_left == 0
    assert limited.infer.num_held == sum(name == "infer" for name, _ in set(table.needs) - session.worked())

    rest = RunSchedule(plan, table.selection, most_waiting=simulation.schedule.most_waiting)
    rest.resume(by_stage(sorted(session.worked())))
    last = Simulation(table, rest, simulation.random, done=session.worked())
    last.run()
    assert last.worked() == set(table.needs)
    assert rest.is_complete


def shards_touched(plan: Plan, box: Box) -> set[int]:
    """Return the shards of level 0 that share a voxel with `box`."""
    shards = plan.shards()
    return {shard for shard in range(len(shards)) if share_a_voxel(box, shards.box(shard))}


@MANY
@given(choices(longest=14))
def test_tensors_that_are_to_be_kept_are_not_discarded(selection: Selection) -> None:
    schedule = RunSchedule(selection.plan, selection, keep_tensors=True)
    simulation = Simulation(Table(selection), schedule, random.Random(0))
    simulation.run()
    assert simulation.schedule.is_complete
    assert simulation.done == set(simulation.table.needs)


@pytest.mark.parametrize("most_waiting", [1, 2, 5])
def test_no_more_windows_are_made_than_the_net_can_take(most_waiting: int) -> None:
    plan = planned("tensors.mode=stored", "windows.block=[1,1,1]", of=volume((64, 64, 640)))
    schedule = RunSchedule(plan, most_waiting=most_waiting)
    assert schedule.take(schedule.factor, 100) == list(range(most_waiting))
    assert schedule.take(schedule.factor, 100) == []
    for unit in range(most_waiting):
        schedule.finish(schedule.factor, unit)
    assert schedule.take(schedule.factor, 100) == []
    assert schedule.take(schedule.infer, 1) == [0]
    schedule.finish(schedule.infer, 0)
    assert schedule.take(schedule.factor, 100) == [most_waiting]


def test_blocks_that_failed_take_no_room_from_the_others() -> None:
    plan = planned("tensors.mode=stored", "windows.block=[1,1,1]", of=volume((64, 64, 640)))
    schedule = RunSchedule(plan, most_waiting=2)
    for unit in schedule.take(schedule.factor, 2):
        schedule.factor.give_back(unit)
    assert sorted(schedule.take(schedule.factor, 2)) == [0, 1]
    schedule.factor.failed.add(0)
    schedule.finish(schedule.factor, 1)
    assert schedule.take(schedule.infer, 2) == [1]
    schedule.infer.failed.add(1)
    assert schedule.take(schedule.factor, 9) == [2, 3]


def test_the_net_waits_while_sums_wait_to_be_joined_or_discarded() -> None:
    plan = planned(
        "windows.shape=[8,8,8]", "windows.overlap=4", "windows.block=[2,2,2]", "windows.blend=hann",
        "output.shard=[8,8,8]", "output.levels=1", of=volume((16, 16, 64)),
    )  # fmt: skip
    schedule = RunSchedule(plan)
    waited = set[str]()
    while blocks := schedule.take(schedule.infer, 1):
        schedule.finish(schedule.infer, blocks[0])
        for stage in (schedule.reassemble, *schedule.discards.values()):
            while stage.ready:
                waited.add(stage.name)
                assert schedule.take(schedule.infer, 1) == []
                schedule.finish(stage, *schedule.take(stage, 1))
    assert waited == {"reassemble", "discard sum"}
    assert schedule.infer.num_left == schedule.reassemble.num_left == 0


def test_a_block_that_reaches_a_wanted_shard_and_nothing_wanted_in_it_is_left_alone() -> None:
    plan = planned(
        "windows.shape=[8,8,8]", "windows.overlap=4", "windows.block=[4,4,4]", "windows.blend=hann",
        "tensors.mode=stored", "output.levels=1", of=volume((16, 16, 48)),
    )  # fmt: skip
    assert plan.blocks_of_shard(1) == (0, 1)
    cells = np.zeros((4, 4, 12), bool)
    cells[1, 1, 7] = True  # voxels 28:32, and block 0 reaches to 22
    selection = Selection(plan, np.packbits(cells, axis=-1))
    simulation = Simulation(Table(selection), RunSchedule(plan, selection), random.Random(0))
    simulation.run()
    work = {("factor", 1), ("infer", 1), ("reassemble", 1), ("pyramid 1", 0)}
    assert simulation.done == work | {("discard windows", 1), ("discard sum", 4)}
    assert simulation.schedule.is_complete


def test_blocks_are_begun_in_ascending_order() -> None:
    plan = planned("windows.block=[1,1,1]", of=volume((128, 128, 320)))
    schedule = RunSchedule(plan)
    assert [unit for _ in range(4) for unit in schedule.take(schedule.infer, 5)] == list(range(20))


def test_what_failed_is_told_with_its_box_of_the_output() -> None:
    plan = planned(
        "windows.shape=[8,8,8]", "windows.overlap=4", "windows.block=[2,2,2]", "windows.blend=hann",
        "output.shard=[4,8,8]", "output.levels=2", of=volume((13, 21, 9)),
    )  # fmt: skip
    schedule = RunSchedule(plan)
    missed: dict[str, int] = {"infer": 2, "reassemble": 2, "pyramid 1": 0, "pyramid 2": 0}
    for name, unit in missed.items():
        schedule.by_name[name].failed.add(unit)
    reasons = {(stage.name, unit): "it is bad" for stage in schedule.shown for unit in stage.failed}
    found = {(p.stage, p.unit): p.box for p in schedule.missing(reasons) if p.reason == "it is bad"}
    assert set(found) == set(missed.items())
    voxels = np.indices(plan.out_shape)
    shards = np.ravel_multi_index(tuple(v // n for v, n in zip(voxels, (4, 8, 8), strict=True)), (4, 3, 2))
    for (name, unit), box in found.items():
        inside = np.zeros(plan.out_shape, bool)
        inside[box.slices] = True
        if name == "reassemble":
            assert np.array_equal(inside, shards == unit)
        elif name == "infer":  # of block 2, whose core is 0:8, 8:16, 0:8, windows begin at -2, 10 and -2
            assert np.array_equal(inside, voxels[1] >= 10)
        else:
            factor = plan.factors[int(name[-1])]
            first = [v // f < n for v, f, n in zip(voxels, factor, (4, 8, 8), strict=True)]
            assert np.array_equal(inside, np.logical_and.reduce(first))


@given(st.integers(1, 50), st.sets(st.integers(0, 49)), st.integers(1, 7))
def test_a_single_stage_does_what_an_earlier_session_did_not(size: int, earlier: set[int], most: int) -> None:
    stage = Stage("measure", size)
    schedule = Schedule(stage)
    schedule.resume([{"infer": [0], "measure": [unit for unit in earlier if unit < size]}])
    taken = []
    while units := schedule.take(stage, most):
        assert len(units) <= most
        taken += units
        for unit in units:
            schedule.finish(stage, unit)
    assert taken == [unit for unit in range(size) if unit not in earlier]
    assert stage.num_left == 0


def test_a_block_that_the_net_has_seen_needs_no_windows_again() -> None:
    plan = planned("tensors.mode=stored", "windows.block=[1,1,1]", of=volume((64, 64, 192)))
    schedule = RunSchedule(plan, most_waiting=1)
    schedule.resume([{"infer": [1]}])
    assert schedule.take(schedule.factor, 9) == [0]
    schedule.finish(schedule.factor, 0)
    assert schedule.take(schedule.infer, 9) == [0]
    schedule.finish(schedule.infer, 0)
    assert schedule.take(schedule.factor, 9) == [2]
