"""The loop: over workers that exist in the test alone and finish a task whenever the loop would wait."""

from __future__ import annotations

import gc
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from plans import planned, volume
from scripted import Looped, Workers, succeed

from volpipe.blockwise import loop as loop_module
from volpipe.blockwise.journal import Attempt, Journal, Record, read_records, read_results
from volpipe.blockwise.pace import Prospect
from volpipe.blockwise.phase import LARGEST_BUNDLE, RETRIES, Phase, Progress
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.usage import Usage
from volpipe.errors import ManagerLost, RunStopped, TaskLost, WorkerLost
from volpipe.runs.schedule import RunSchedule


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop_module, "TICK_SECONDS", 0.001)
    yield


def loop_over(
    stage: Stage, workers: Workers, *, slots: int = 2, journal: Journal | None = None, prospect: Prospect | None = None
) -> tuple[Looped, Schedule]:
    schedule = Schedule(stage)
    phase = Phase(schedule, workers.submit, journal, workers.show, prospect=prospect or Prospect())
    return Looped(phase, {"cpu": slots, "gpu": slots}), schedule


@dataclass
class Flaky:
    """Work that fails for some units, some number of times each."""

    failures: dict[int, int]
    attempts: Counter[int] = field(default_factory=Counter)

    def __call__(self, stage: str, units: Sequence[int]) -> Record[Any]:
        self.attempts.update(units)
        failed = [unit for unit in units if self.attempts[unit] <= self.failures.get(unit, 0)]
        reasons = tuple((unit, f"Traceback\nValueError: unit {unit} is bad") for unit in failed)
        usage = Usage(started=1.0, seconds=0.001 * len(units))
        return Record(stage, tuple(unit for unit in units if unit not in failed), reasons, usage=usage)


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_twice_as_many_tasks_as_workers_are_in_flight_and_never_more(slots: int) -> None:
    workers = Workers()
    loop_over(Stage("work", 5000), workers, slots=slots)[0].run()
    assert workers.most_in_flight["work"] == 2 * slots
    assert Counter(unit for _, units in workers.tasks for unit in units) == Counter(range(5000))


def test_each_label_has_its_own_workers() -> None:
    plan = planned("tensors.mode=stored", "windows.block=[1,1,1]", "output.levels=0", of=volume((256, 256, 1024)))
    schedule, workers = RunSchedule(plan), Workers()
    Looped(Phase(schedule, workers.submit, None, workers.show), {"cpu": 3, "gpu": 1}).run()
    assert schedule.is_complete
    assert workers.most_in_flight["infer"] == 2
    assert 2 < workers.most_in_flight["factor"] <= 6


def test_what_fails_twice_and_then_succeeds_is_done() -> None:
    flaky = Flaky({3: 2, 60: 1, 99: 2})
    loop, _ = loop_over(stage := Stage("work", 100), Workers(flaky))
    loop.run()
    assert stage.num_done == 100
    assert stage.failed == set()
    assert {unit: n for unit, n in flaky.attempts.items() if n > 1} == {3: 3, 60: 2, 99: 3}


def test_what_fails_for_good_is_set_aside_with_its_reason_and_harms_no_other(tmp_path: Path) -> None:
    flaky = Flaky({7: 99, 300: 99})
    workers = Workers(flaky)
    with Journal(tmp_path / "journal", ()) as journal:
        loop, _ = loop_over(stage := Stage("work", 500), workers, journal=journal)
        loop.run()
    assert stage.failed == {7, 300}
    assert stage.num_done == 498
    assert loop.reasons["work", 300].endswith("ValueError: unit 300 is bad")
    assert flaky.attempts[7] == flaky.attempts[300] == 1 + RETRIES
    assert max(flaky.attempts[unit] for unit in range(500) if unit not in (7, 300)) == 1
    for bad in (7, 300):  # after its first failure a unit goes alone
        assert [len(units) for _, units in workers.tasks if bad in units][1:] == [1] * RETRIES
    marked = [unit for record in read_records(tmp_path / "journal", ()) for unit in record.done]
    assert sorted(marked) == [unit for unit in range(500) if unit not in (7, 300)]


def test_each_attempt_that_failed_is_in_the_journal(tmp_path: Path) -> None:
    workers = Workers(Flaky({3: 2, 7: 99}))
    with Journal(tmp_path / "journal", ()) as journal:
        loop_over(Stage("work", 50), workers, journal=journal)[0].run()
        attempts = list(read_results(journal.path, journal.kinds, Attempt))
        records = list(read_records(journal.path, journal.kinds))
    assert [a.number for a in attempts if 3 in a.units] == [1, 2]
    assert [a.number for a in attempts if 7 in a.units] == [1, 2, 3]
    assert {a.reason for a in attempts if a.units == (7,)} == {"ValueError: unit 7 is bad"}
    failed = [record for record in records if isinstance(record.result, Attempt)]
    assert not any(record.done or record.failed for record in failed)
    # What a task took stands once, in the line of its units that came through where there are any.
    tried = sum(len(units) for _, units in workers.tasks)
    assert sum(record.usage.seconds for record in records) == pytest.approx(0.001 * tried)


def test_the_attempt_of_a_lost_worker_says_when_it_was_sent_and_for_how_long_it_was_gone(tmp_path: Path) -> None:
    began = time.time()
    with Journal(tmp_path / "journal", ()) as journal:
        loop_over(Stage("work", 5), Workers(Losing(WorkerLost, 1)), journal=journal)[0].run()
        lost = [record for record in read_records(journal.path, journal.kinds) if isinstance(record.result, Attempt)]
    assert sorted(unit for record in lost for unit in record.result.units) == list(range(5))
    for record in lost:
        assert began <= record.usage.started <= record.usage.started + record.usage.seconds <= time.time()
        assert record.result.reason == "WorkerLost: gone"


def test_the_journal_says_how_long_a_task_waited_for_a_worker(tmp_path: Path) -> None:
    def late(stage: str, units: Sequence[int]) -> Record[Any]:
        return Record(stage, tuple(units), usage=Usage(started=time.time() + 100 if units[0] else 1.0, seconds=0.001))

    with Journal(tmp_path / "journal", ()) as journal:
        loop_over(Stage("work", 2), Workers(late), journal=journal)[0].run()
        waited = {record.done[0]: record.usage.queued_seconds for record in read_records(journal.path, journal.kinds)}
    assert waited[0] == 0.0  # a clock that is behind
    assert waited[1] == pytest.approx(100, abs=10)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_run_stops_when_everything_fails_alike(size: int) -> None:
    workers = Workers(Flaky(dict.fromkeys(range(size), 99)))
    loop, _ = loop_over(Stage("work", size), workers)
    parts = " for [23] parts and worked for none" if size > 1 else ""
    with pytest.raises(RunStopped, match=rf"^work failed{parts}, so the work stops: ValueError: unit \d+ is bad$"):
        loop.run()
    assert len(workers.tasks) <= 3 * (1 + RETRIES) + 2 * 2 * (1 + RETRIES)


class Ours:
    """Work that raises an error of ours for every unit."""

    def __call__(self, stage: str, units: Sequence[int]) -> Record[Any]:
        reason = "Traceback\nvolpipe.errors.PlanError: 3 voxels are NaN; mend the volume"
        return Record(stage, (), tuple((unit, reason) for unit in units))


def test_an_error_of_ours_stops_a_run_with_its_sentence_alone() -> None:
    loop, _ = loop_over(Stage("work", 1), Workers(Ours()))
    with pytest.raises(RunStopped, match=r"so the work stops: 3 voxels are NaN; mend the volume$"):
        loop.run()


def test_a_run_goes_on_when_something_succeeded() -> None:
    loop, _ = loop_over(stage := Stage("work", 10), Workers(Flaky(dict.fromkeys(range(1, 10), 99))))
    loop.run()
    assert stage.failed == set(range(1, 10))


@pytest.mark.parametrize(("every", "stops"), [(8, True), (12, False)])
def test_a_run_stops_when_more_than_the_tolerated_share_fails(every: int, stops: bool) -> None:
    bad = range(every - 1, 1000, every)
    loop, _ = loop_over(stage := Stage("work", 1000), Workers(Flaky(dict.fromkeys(bad, 99))))
    if not stops:
        loop.run()
        assert stage.failed == set(bad)
        return
    with pytest.raises(RunStopped) as stopped:
        loop.run()
    sentence = r"work failed for good for (\d+) of the (\d+) parts that were tried, more than 10%, so the work stops"
    found = re.match(sentence, str(stopped.value))
    assert found is not None
    failed, begun = map(int, found.groups())
    assert failed == len(stage.failed) >= 10
    assert begun == failed + stage.num_done
    assert failed > 0.1 * begun
    assert stopped.value.detail.startswith("Traceback\nValueError: unit ")
    assert stage.num_done < 500


def test_failures_that_differ_do_not_stop_a_run_at_its_start() -> None:
    kinds = ["no memory", "no disk", "no voxel", "no idea"]

    def fail(stage: str, units: Sequence[int]) -> Record[Any]:
        return Record(stage, (), tuple((unit, f"ValueError: {kinds[unit]}") for unit in units))

    loop, _ = loop_over(stage := Stage("work", 4), Workers(fail))
    loop.run()
    assert stage.failed == {0, 1, 2, 3}


def test_a_strict_run_stops_at_the_first_unit_that_fails_for_good() -> None:
    workers = Workers(Flaky({2: 1, 40: 99}))
    stage = Stage("work", 500)
    loop = Looped(Phase(Schedule(stage), workers.submit, None, workers.show, tolerated=0), {"cpu": 1})
    with pytest.raises(RunStopped, match=r"^work 40 failed, so the work stops: ValueError: unit 40 is bad$"):
        loop.run()
    assert stage.done[2]


def test_what_is_hopeless_is_tried_once_and_counts_in_the_share_alone(tmp_path: Path) -> None:
    attempts: Counter[int] = Counter()

    def work(stage: str, units: Sequence[int]) -> Record[Any]:
        attempts.update(units)
        bad = tuple(unit for unit in units if unit < 5)
        return Record(stage, tuple(u for u in units if u >= 5), tuple((u, f"in chunk {u}") for u in bad), permanent=bad)

    with Journal(tmp_path / "journal", ()) as journal:
        loop, _ = loop_over(stage := Stage("work", 100), Workers(work), journal=journal)
        loop.run()
    assert stage.failed == {0, 1, 2, 3, 4}
    assert set(attempts.values()) == {1}
    told = [failed for record in read_records(tmp_path / "journal", ()) for failed in record.failed]
    assert sorted(told) == [(unit, f"in chunk {unit}") for unit in range(5)]


def test_what_an_earlier_session_did_counts_as_success() -> None:
    loop, schedule = loop_over(stage := Stage("work", 10), Workers(Flaky(dict.fromkeys(range(10), 99))))
    schedule.resume([{"work": [4]}])
    loop.run()
    assert stage.failed == set(range(10)) - {4}


def test_the_units_of_a_lost_worker_are_tried_again_one_by_one() -> None:
    lost: list[list[int]] = []

    def lose_one(stage: str, units: Sequence[int]) -> Record[Any]:
        if len(units) > 5 and not lost:
            lost.append(list(units))
            raise RuntimeError("worker 3 was lost")
        return succeed(stage, units)

    workers = Workers(lose_one)
    loop, _ = loop_over(stage := Stage("work", 200), workers)
    loop.run()
    assert stage.num_done == 200
    assert loop.reasons["work", lost[0][0]] == "RuntimeError: worker 3 was lost"
    again = [units for _, units in workers.tasks if set(units) & set(lost[0]) and units != lost[0]]
    assert sorted(again) == [[unit] for unit in lost[0]]


@dataclass
class Losing:
    """Work whose first tasks for each unit never answer, for one reason or the other."""

    reason: type[TaskLost]
    losses: int
    attempts: Counter[int] = field(default_factory=Counter)

    def __call__(self, stage: str, units: Sequence[int]) -> Record[Any]:
        self.attempts.update(units)
        if any(self.attempts[unit] <= self.losses for unit in units):
            raise self.reason("gone")
        return succeed(stage, units)


@pytest.mark.parametrize(("further", "tries"), [((), 3), ((3, 4, 6), 8)])
def test_failures_before_a_unit_came_further_count_no_more(further: Sequence[int], tries: int) -> None:
    """Of two units that never succeed, the second comes further between some of its attempts."""
    flaky, asked = Flaky({0: 99, 1: 99}), Counter[int]()

    def forgives(unit: int) -> bool:
        asked[unit] += 1
        return unit == 1 and asked[unit] in further

    loop, _ = loop_over(stage := Stage("work", 9, forgives=forgives), Workers(flaky))
    loop.run()
    assert stage.failed == {0, 1}
    assert (flaky.attempts[0], flaky.attempts[1]) == (3, tries)


@pytest.mark.parametrize(("reason", "tries"), [(ManagerLost, 5), (WorkerLost, 2)])
def test_a_lost_node_costs_a_task_less_than_a_lost_worker(reason: type[TaskLost], tries: int) -> None:
    losing = Losing(reason, tries - 1)
    loop, _ = loop_over(stage := Stage("work", 1), Workers(losing))
    loop.run()
    assert (stage.num_done, losing.attempts[0]) == (1, tries)
    losing = Losing(reason, tries)
    loop, _ = loop_over(stage := Stage("work", 2), Workers(losing))
    if reason is WorkerLost:
        with pytest.raises(RunStopped, match=r"^work failed for 2 parts and worked for none, so .*: WorkerLost: gone$"):
            loop.run()
    else:
        loop.run()
        assert stage.failed == {0, 1}
        assert losing.attempts == {0: tries, 1: tries}


def test_lost_nodes_alone_do_not_stop_a_run() -> None:
    loop, _ = loop_over(stage := Stage("work", 20), Workers(Losing(ManagerLost, 99)))
    loop.run()
    assert stage.failed == set(range(20))
    assert loop.reasons["work", 19] == "ManagerLost: gone"


def test_bundles_grow_while_tasks_are_short_and_shrink_at_the_end() -> None:
    workers = Workers()
    loop_over(Stage("work", 3000), workers, slots=2)[0].run()
    sizes = [len(units) for _, units in workers.tasks]
    assert sizes[:4] == [1, 1, 1, 1]  # nobody knows yet how long a unit takes
    assert max(sizes) == LARGEST_BUNDLE
    left = 3000
    for size in sizes:
        assert size <= -(-left // 4)  # what is left is shared by the four tasks in flight
        left -= size
    assert sizes[-4:] == [1, 1, 1, 1]
    assert len(sizes) < 3000 / LARGEST_BUNDLE + 30


@pytest.mark.parametrize(("seconds", "sizes"), [(1.0, [1, 1, 30, 15]), (0.25, [1, 1, 23, 11, 6, 3, 1, 1])])
def test_a_worker_alone_takes_long_units_in_whole_tasks_to_the_end(seconds: float, sizes: list[int]) -> None:
    workers = Workers(lambda stage, units: Record(stage, tuple(units), usage=Usage(seconds=seconds * len(units))))
    loop_over(Stage("work", 47), workers, slots=1)[0].run()
    assert [len(units) for _, units in workers.tasks] == sizes


@pytest.mark.parametrize(
    ("planned", "slots", "sizes"),
    [(3.0, 1, [10, 10, 27]), (0.25, 1, [1, 1, 30, 15]), (3.0, 2, [1, 1, 1, 1]), (0.0, 1, [1, 1, 30, 15])],
)
def test_a_worker_alone_takes_whole_tasks_from_the_first_where_long_units_are_planned(
    planned: float, slots: int, sizes: list[int]
) -> None:
    workers = Workers(lambda stage, units: Record(stage, tuple(units), usage=Usage(seconds=1.0 * len(units))))
    loop, _ = loop_over(Stage("work", 47), workers, slots=slots, prospect=Prospect({"work": planned}))
    loop.run()
    assert [len(units) for _, units in workers.tasks][: len(sizes)] == sizes


@pytest.mark.parametrize(("seconds", "num_units", "most"), [(25.0, 40, 1), (1.0, 400, 30)])
def test_long_tasks_go_alone_and_units_of_a_second_thirty_at_a_time(seconds: float, num_units: int, most: int) -> None:
    workers = Workers(lambda stage, units: Record(stage, tuple(units), usage=Usage(seconds=seconds * len(units))))
    loop_over(Stage("work", num_units), workers)[0].run()
    assert max(len(units) for _, units in workers.tasks) == most


def test_bundles_follow_when_units_become_slow() -> None:
    def work(stage: str, units: Sequence[int]) -> Record[Any]:
        return Record(stage, tuple(units), usage=Usage(seconds=sum(2.0 if unit >= 2000 else 0.001 for unit in units)))

    workers = Workers(work)
    loop_over(Stage("work", 4000), workers, slots=2)[0].run()
    slow = [len(units) for _, units in workers.tasks if units[-1] >= 2000]
    assert max(slow) == LARGEST_BUNDLE
    assert sum(size > 30 for size in slow) <= 2 * 2 + 1  # those that were sent before the first slow one came back
    assert slow[20:40] == [15] * 20


def test_a_shard_is_added_up_while_the_net_still_runs_and_coarser_levels_follow() -> None:
    overlapping = ("windows.shape=[64,64,64]", "windows.overlap=32", "windows.block=[2,2,2]", "windows.blend=hann")
    plan = planned(*overlapping, "output.levels=2", of=volume((64, 64, 2560)))
    schedule = RunSchedule(plan)
    workers = Workers(lambda stage, units: Record(stage, tuple(units), usage=Usage(seconds=9.0 * len(units))))

    def show(progress: Progress) -> None:
        waiting = schedule.reassemble.ready or any(stage.ready for stage in schedule.pyramid)
        cpu = sum(stage != "infer" for _, stage, _ in workers.in_flight)
        assert not waiting or cpu == 2 * 2  # nothing that may start is kept back but for want of room
        workers.show(progress)

    Looped(Phase(schedule, workers.submit, None, show), {"cpu": 2, "gpu": 1}).run()
    assert schedule.is_complete
    stages = [stage for stage, _ in workers.tasks]
    last = len(stages) - 1 - stages[::-1].index("infer")
    assert "reassemble" in stages[:last]
    assert "pyramid 1" in stages[:last]
    assert "discard sum" in stages[:last]


def test_ten_to_the_five_units_cost_few_calls_and_no_memory(tmp_path: Path) -> None:
    num_units, num_looks = 100_000, 0

    def waits(unit: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    stage = Stage("work", num_units, waits=waits)
    stage.look_again()
    workers = Workers()
    with Journal(tmp_path / "journal", ()) as journal:
        loop, _ = loop_over(stage, workers, journal=journal)
        tracemalloc.start()
        loop.run()
        workers.tasks, num_tasks = [], len(workers.tasks)
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert stage.num_done == num_units
    assert num_looks == num_units
    assert num_tasks < num_units / LARGEST_BUNDLE + 100
    assert workers.num_shows < 2 * num_tasks + 100
    assert sum(1 for _ in read_records(tmp_path / "journal", ())) == num_tasks
    assert left < 50_000


def test_whoever_shows_progress_hears_of_every_task_and_of_silence() -> None:
    seen: list[tuple[int, int]] = []

    def show(progress: Progress) -> None:
        seen.append((progress.totals["work"].units, progress.running["work"]))
        if len(seen) > 5:  # nothing came back so far
            workers.show(progress)

    workers = Workers()
    stage = Stage("work", 30)
    loop = Looped(Phase(Schedule(stage), workers.submit, None, show), {"cpu": 1, "gpu": 1})
    loop.run()
    assert seen[:5] == [(0, 2)] * 5
    assert seen[-1] == (30, 0)
    shown = [units for units, _ in seen]
    assert shown == sorted(shown)
    assert len(set(shown)) == 1 + len(workers.tasks)
    totals = loop.phase.progress.totals["work"]
    assert (totals.units, totals.tasks) == (30, len(workers.tasks))
    assert totals.seconds == pytest.approx(0.03)
    assert loop.phase.progress.stages == [stage]


def test_totals_add_up_and_keep_the_highest_peak() -> None:
    peaks = iter([5, 9, 2])

    def work(stage: str, units: Sequence[int]) -> Record[Any]:
        return Record(
            stage, tuple(units),
            usage=Usage(100.0, seconds=20.0, cpu_seconds=2.0, peak_bytes=next(peaks), read_bytes=10, written_bytes=7),
        )  # fmt: skip

    loop, _ = loop_over(Stage("work", 3), Workers(work))
    loop.run()
    totals = loop.phase.progress.totals["work"]
    assert (totals.units, totals.tasks, totals.peak_bytes, totals.read_bytes) == (3, 3, 9, 30)
    assert (totals.seconds, totals.cpu_seconds, totals.written_bytes) == (60.0, 6.0, 21)
    assert loop.phase.progress.first_task == 100.0


def test_discards_are_done_and_leave_no_mark(tmp_path: Path) -> None:
    plan = planned("tensors.mode=stored", "windows.block=[1,1,1]", "output.levels=0", of=volume((64, 64, 640)))
    schedule, workers = RunSchedule(plan), Workers()
    with Journal(tmp_path / "journal", ()) as journal:
        Looped(Phase(schedule, workers.submit, journal, workers.show), {"cpu": 1, "gpu": 1}).run()
    assert sorted(u for stage, units in workers.tasks if stage == "discard windows" for u in units) == list(range(10))
    assert {record.stage for record in read_records(tmp_path / "journal", ())} == {"factor", "infer"}
