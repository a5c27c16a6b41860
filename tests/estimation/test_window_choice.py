"""The windows of a plan: the fastest, of those that were measured, for which the workers of its site have memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from plans import facts, volume
from volumes import noise, write_volume

from volpipe.blockwise.pool import Capacity, Gpu
from volpipe.estimation import memory, window_choice
from volpipe.estimation.measure import processor
from volpipe.estimation.memory import gpu_bytes, memory_bytes
from volpipe.estimation.window_choice import _precision_difference, fastest_plan
from volpipe.geometry.grid import Triple
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import NetSizes, Plan, make_plan
from volpipe.inference.selection import Selection
from volpipe.nets.cache import known_speeds
from volpipe.nets.facts import Arithmetic, NetFacts, NetSpeeds, PrecisionDifference, WindowSpeed, WindowSpeeds
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice, Normalise, load_recipe
from volpipe.runs.provenance import RunOrigin, origin
from volpipe.runs.run_folder import RunFolder
from volpipe.stages.sizing import Sizing
from volpipe.workflow.prepare import prepare

GIB = 1 << 30
LARGE = (512, 512, 512)
NET = facts(label="blur", halo=(8, 8, 8), window=(80, 80, 80), num_parameters=1)  # cores of 64
# Seconds for a voxel of a window: less the larger it is, up to a core of 128, and less with channels last.
PER_VOXEL = {48: 3e-6, 80: 1.2e-6, 112: 1e-6, 144: 0.8e-6, 208: 1.1e-6}


# Seconds and memory of each arithmetic, by those of float32 with channels first.
COSTS = {(False, "float32"): (1.0, 500), (True, "float32"): (0.8, 500), (False, "bfloat16"): (0.5, 250)}
COSTS[True, "bfloat16"] = (0.4, 250)


def speeds() -> NetSpeeds:
    measured = [
        WindowSpeeds(
            arithmetic=Arithmetic(*arithmetic),
            bytes_per_voxel=num_bytes,
            windows=[WindowSpeed(window=(n, n, n), seconds=n**3 * rate * share) for n, rate in PER_VOXEL.items()],
        )
        for arithmetic, (share, num_bytes) in COSTS.items()
    ]
    return NetSpeeds(processor=processor(), speeds=tuple(measured))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_choice, "known_speeds", lambda *arguments: speeds())
    monkeypatch.setattr(window_choice, "has_bfloat16", lambda: True)
    monkeypatch.setattr(window_choice, "_precision_difference", lambda *arguments: None)
    monkeypatch.setattr(memory, "cuda_bytes", lambda: 0)  # whichever torch is here


def chosen(
    worker_bytes: float | None = 16 * GIB,
    num_workers: int = 2,
    *,
    settings: Sequence[str] = (),
    shape: Triple = LARGE,
    net: NetFacts = NET,
    on_gpu: bool = False,
    gpu: Gpu | None = None,
) -> Plan:
    capacity = Capacity(None if worker_bytes is None else int(worker_bytes), num_workers, on_gpu, gpu)
    make = partial(make_plan, load_recipe(Path("none"), settings), volume(shape), net, out=Path("/data/out.zarr"))
    return fastest_plan(lambda sizes: make(sizes=sizes), capacity)


def test_the_fastest_windows_are_taken_and_what_they_gain_is_said() -> None:
    plan = chosen()
    assert (plan.window, plan.channels_last) == ((144, 144, 144), True)
    # By hand: 8³ windows of 80³ against 4³ of 144³, times seconds for a voxel.
    gain = 8**3 * 80**3 * 1.2 / (4**3 * 144**3 * 0.8 * 0.8)
    assert plan.notes.windows == f"{gain:.2g} times as fast as windows of 80 × 80 × 80, the net's own"


@pytest.mark.parametrize(("shape", "is_said"), [(LARGE, True), ((240, 240, 240), False)])
def test_of_a_large_volume_it_is_said_that_times_are_another_machines(
    monkeypatch: pytest.MonkeyPatch, shape: Triple, is_said: bool
) -> None:
    assert "another machine" not in chosen(shape=shape).notes.windows
    monkeypatch.setattr(window_choice, "shipped_speeds", lambda choice: speeds())
    note = chosen(shape=shape).notes.windows
    assert "times as fast as windows of" in note
    assert note.endswith(f"; {window_choice.SHIPPED}") == is_said


@pytest.mark.parametrize("gib", [0.1, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 4.0, 16.0])
def test_no_window_is_taken_for_which_the_workers_have_too_little_memory(gib: float) -> None:
    plan = chosen(gib * GIB)
    fits = memory_bytes(plan, None, speeds=speeds()) <= gib * GIB
    own = chosen(None)
    assert fits or plan == own  # of which the run says what would fit
    assert plan.window[0] <= 144


def test_what_the_next_larger_window_would_need_is_said() -> None:
    plan = chosen(1.5 * GIB)
    assert plan.window == (102, 102, 102)  # of 112, fitted: six as large cover 512 voxels
    assert "144 × 144 × 144 would be " in plan.notes.windows
    assert "a worker, for which this site has 1.5 GiB" in plan.notes.windows


def test_a_worker_with_too_little_memory_for_the_nets_own_window_gets_a_smaller_one() -> None:
    assert chosen(0.65 * GIB).window == (48, 48, 48)


HUGE, WORTH_A_GPU = (4096, 4096, 4096), (1300, 1300, 1300)


def slower(factor: float) -> NetSpeeds:
    times = [
        each.model_copy(
            update={"windows": [WindowSpeed(window=w.window, seconds=factor * w.seconds) for w in each.windows]}
        )
        for each in speeds().speeds
    ]
    return NetSpeeds(processor=processor(), speeds=tuple(times))


def block_seconds(plan: Plan, known: NetSpeeds, num_forms: int = 1) -> float:
    side = plan.window[0]
    rate = {
        window.window[0]: window.seconds
        for window in next(s for s in known.speeds if s.arithmetic == plan.arithmetic).windows
    }
    return math.prod(plan.block) * num_forms * rate[side]


@pytest.mark.parametrize(
    ("factor", "settings", "num_forms"),
    [(1, [], 1), (4, [], 1), (1, ["infer.augment=flips"], 8), (1, ["windows.blend=hann"], 1)],
)
@pytest.mark.parametrize("worker_bytes", [None, 64 * GIB])
def test_a_large_block_takes_a_core_twelve_minutes_at_most(
    monkeypatch: pytest.MonkeyPatch, factor: float, settings: list[str], num_forms: int, worker_bytes: float | None
) -> None:
    known = slower(factor)
    monkeypatch.setattr(window_choice, "known_speeds", lambda *arguments: known)
    plan = chosen(worker_bytes, shape=HUGE, settings=settings)
    assert plan.has_slabs and 75 < block_seconds(plan, known, num_forms) <= 720


def test_where_nobody_knows_how_long_a_block_takes_it_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_choice, "known_speeds", lambda *arguments: NetSpeeds(processor=processor()))
    assert not chosen(shape=HUGE).has_slabs
    assert chosen(shape=HUGE, net=NET.model_copy(update={"num_parameters": 0})).has_slabs


@pytest.mark.parametrize("unknown", [{"worker_bytes": None}, {"on_gpu": True}])
def test_where_nothing_is_known_of_workers_the_nets_own_window_is_taken(unknown: dict[str, bool]) -> None:
    plan = chosen(**unknown)
    assert (plan.window, plan.channels_last, plan.notes.windows) == ((80, 80, 80), False, "")


@pytest.mark.parametrize(
    ("settings", "net"),
    [
        (["windows.blend=hann"], NET),
        (["windows.shape=[80,80,80]"], NET),
        ([], facts(label="one", halo=(8, 8, 8), window=(80, 80, 80), fixed=(80, 80, 80), num_parameters=1)),
        (["net.accept_tile_variance=true"], NET),  # by which a halo may be smaller than the exact one
        (["net.accept_tile_variance=true"], NET.model_copy(update={"tile_invariant": False})),
    ],
)
def test_windows_that_would_change_more_than_last_bits_stay_and_the_layout_is_chosen(
    settings: list[str], net: NetFacts
) -> None:
    plan = chosen(settings=settings, net=net)
    assert (plan.window, plan.channels_last) == ((80, 80, 80), True)


@pytest.mark.parametrize("value", ["true", "false"])
def test_a_layout_that_the_recipe_gives_is_taken(value: str) -> None:
    assert chosen(settings=[f"infer.channels_last={value}"]).channels_last is (value == "true")


@pytest.mark.parametrize("setting", ["infer.compile=true", "infer.exact=true", "infer.precision=float16"])
def test_a_net_that_computes_otherwise_than_it_was_measured_stays_as_it_is(setting: str) -> None:
    plan = chosen(settings=[setting])
    assert (plan.window, plan.channels_last) == ((80, 80, 80), False)


def given(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    """Let the net differ in bfloat16 by `values`."""
    measured = PrecisionDifference.model_validate(
        {"normalise": Normalise(), "relative": 0.002, "levels": 1, "share": 0.13} | values
    )
    monkeypatch.setattr(window_choice, "_precision_difference", lambda *arguments: measured)


AUTO = "infer.precision=auto"


def test_bfloat16_is_taken_where_it_is_faster_and_asked_for_and_what_it_changes_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch)
    plan = chosen(settings=[AUTO])
    assert (plan.window, plan.sizes) == ((144, 144, 144), NetSizes((144, 144, 144), True, "bfloat16"))
    assert plan.notes.precision == (
        "bfloat16, 2 times as fast as float32; over an invented volume it changes 0.13 of the voxels by one grey level"
    )
    assert plan.notes.windows == chosen().notes.windows  # what windows gain is told in the same precision


def test_float32_stays_where_nobody_asks_and_what_another_precision_would_gain_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch)
    plan, small = chosen(), chosen(shape=(128, 128, 128))
    assert plan.precision == small.precision == "float32" and not small.notes.precision
    assert plan.notes.precision == (
        "float32; infer.precision=auto would take bfloat16, 2 times as fast as float32; over an invented volume "
        "it changes 0.13 of the voxels by one grey level"
    )
    without = plan.changed(notes=replace(plan.notes, precision=""))
    monkeypatch.setattr(window_choice, "has_bfloat16", lambda: False)  # a processor that is slower with it
    assert chosen() == without and chosen(settings=[AUTO]).precision == "float32"


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ([], {"levels": 2}),
        (["output.kind=labels"], {"levels": 0}),
        (["output.dtype=uint16"], {"levels": 0}),
        (["output.intensity=unit"], {"levels": 0}),
        (["output.dtype=float32"], {"relative": 0.002}),
    ],
)
def test_bfloat16_is_not_taken_where_it_changes_more_than_the_output_is_rounded_by(
    settings: list[str], values: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, **values)
    plan = chosen(settings=[AUTO, *settings])
    assert (plan.precision, plan.notes.precision, plan.window) == ("float32", "", (144, 144, 144))


def test_floats_may_differ_by_a_thousandth_of_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, relative=0.0009)
    plan = chosen(settings=[AUTO, "output.dtype=float32"])
    assert plan.precision == "bfloat16" and "by at most 0.0009 of the output's range" in plan.notes.precision


def test_windows_that_fit_in_bfloat16_alone_are_taken_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    assert chosen(1.5 * GIB).window == (102, 102, 102)
    assert chosen(1.5 * GIB, settings=[AUTO]).window == (144, 144, 144)


@pytest.mark.parametrize("value", ["float32", "tf32", "bfloat16"])
def test_a_precision_that_the_recipe_gives_is_taken(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, levels=200)
    plan = chosen(settings=[f"infer.precision={value}"])
    assert (plan.precision, plan.window) == (value, (144, 144, 144))


def test_a_net_whose_code_is_known_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text("def net():\n    pass\n")
    asked = []

    def measure(
        choice: NetChoice, normalise: Normalise, net: NetFacts, folder: str, *, precision: str, device: str
    ) -> PrecisionDifference:
        assert (precision, device) == ("bfloat16", "cpu")
        asked.append(net.weights_sha256)
        return PrecisionDifference(normalise=normalise, relative=0.002, levels=1, share=0.13)

    monkeypatch.setattr(window_choice, "_precision_difference", _precision_difference)
    monkeypatch.setattr(window_choice, "difference_here", measure)
    mine = [AUTO, f"net.name={tmp_path / 'mine.py'}:net"]
    assert chosen(settings=mine, shape=(128, 128, 128)).precision == "float32" and not asked
    for _ in range(2):
        assert chosen(settings=mine).precision == "bfloat16" and asked == ["0"]
    chosen(settings=mine, net=NET.model_copy(update={"weights_sha256": "1"}))
    chosen(settings=[*mine, "normalise.low=50", "normalise.high=200"])  # of which a grey level is another share
    assert asked == ["0", "1", "0"]
    assert chosen(settings=[AUTO, "net.name=package:net"]).precision == "float32" and len(asked) == 3


def test_windows_are_no_larger_than_leaves_all_workers_work() -> None:
    choose = partial(chosen, settings=["windows.block=[1,1,1]"], shape=(256, 256, 256))
    assert choose(num_workers=1).window == (144, 144, 144)
    crowded = choose(num_workers=64)
    assert crowded.window == (80, 80, 80) and crowded.num_active == 64


def test_a_small_volume_has_one_window_that_covers_it() -> None:
    assert chosen(shape=(64, 64, 64)).window == (80, 80, 80)


def test_a_run_that_was_begun_keeps_its_windows_on_whatever_site_it_goes_on(tmp_path: Path) -> None:
    location = str(write_volume(tmp_path / "in.n5", noise((200, 200, 200))))
    recipe, out = load_recipe(None, []), tmp_path / "out.zarr"
    large, small = (Sizing(Capacity(int(n * GIB), 1, on_gpu=False)) for n in (16, 1.0))
    first = prepare(location, recipe, out, tmp_path, large)
    assert first.window != (other := prepare(location, recipe, out, tmp_path, small)).window
    assert prepare(location, recipe, out, tmp_path, large).identity == first.identity
    (folder := RunFolder.from_output(out)).path.mkdir()
    folder.store(first)
    for sizing in (large, small, Sizing()):
        assert prepare(location, recipe, out, tmp_path, sizing).identity == first.identity
    fresh = Sizing(small.capacity, fresh=True)
    assert prepare(location, recipe, out, tmp_path, fresh).identity == other.identity


def test_an_output_is_made_again_by_the_windows_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    plan = chosen(settings=[AUTO])
    again = RunOrigin.model_validate(
        origin(Selection(plan), Affine(), ["0"]) | {"run": {"output": "/data/out.zarr"}}
    ).again
    made = make_plan(load_recipe(Path("none")).model_validate(again.model_dump()), volume(LARGE), NET, out=Path("/b"))
    assert (made.sizes, made.overlap) == (plan.sizes, plan.overlap)
    assert plan.channels_last and plan.precision == "bfloat16"


@pytest.mark.parametrize("size", [61, 62, 63, 64, 100, 126, 300])
def test_a_window_that_was_fitted_to_a_volume_is_fitted_to_it_as_it_is(size: int) -> None:
    recipe, shape = load_recipe(Path("none")), (size, size, size)
    make = partial(make_plan, recipe, volume(shape), NET, out=Path("/data/out.zarr"))
    for window in (48, 80, 112, 144, 208):
        plan = make(sizes=NetSizes((window, window, window), channels_last=True))
        assert make(sizes=plan.sizes).identity == plan.identity


def test_a_run_in_bfloat16_that_was_begun_goes_on_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    location = str(write_volume(tmp_path / "in.n5", noise((200, 200, 200))))
    recipe, out = load_recipe(None, [AUTO]), tmp_path / "out.zarr"
    sizing = Sizing(Capacity(16 * GIB, 1, on_gpu=False))
    first = prepare(location, recipe, out, tmp_path, sizing)
    (folder := RunFolder.from_output(out)).path.mkdir()
    folder.store(first)
    monkeypatch.setattr(window_choice, "has_bfloat16", lambda: False)
    assert first.precision == "bfloat16"
    for other in (sizing, Sizing()):
        assert prepare(location, recipe, out, tmp_path, other).identity == first.identity
    assert prepare(location, recipe, out, tmp_path, Sizing(sizing.capacity, fresh=True)).precision == "float32"


@pytest.mark.parametrize("recipe", ["default", "affinities", "superres_z2", "superres_z4"])
def test_shipped_recipes_have_measured_windows(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_choice, "known_speeds", known_speeds)
    chosen_recipe = load_recipe(Path(recipe))
    net = describe(chosen_recipe.net)
    make = partial(make_plan, chosen_recipe, volume(LARGE), net, out=Path("/data/out.zarr"))
    plan = fastest_plan(lambda sizes: make(sizes=sizes), Capacity(12 * GIB, 2, on_gpu=False))
    assert plan.channels_last
    assert math.prod(plan.window) >= math.prod(make().window)


def test_a_small_volume_is_not_worth_measuring_and_a_large_one_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(window_choice, "known_speeds", known_speeds)
    (tmp_path / "mine.py").write_text("def net():\n    pass\n")
    asked = []

    def measure(choice: NetChoice, net: NetFacts, folder: str, *, gpu: str) -> NetSpeeds | None:
        assert not gpu
        asked.append(choice.name)
        return speeds() if len(asked) == 1 else None

    monkeypatch.setattr(window_choice, "speeds_here", measure)
    settings = [f"net.name={tmp_path / 'mine.py'}:net"]
    assert chosen(settings=settings, shape=(256, 256, 256)).window == (80, 80, 80) and not asked
    for _ in range(2):
        assert chosen(settings=settings).window == (144, 144, 144) and len(asked) == 1
    (tmp_path / "mine.py").write_text("def net():\n    return 1\n")  # another net, which cannot be timed
    for _ in range(2):
        assert chosen(settings=settings).window == (80, 80, 80) and len(asked) == 2


H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forget what is known, and let GPUs give `speeds`; return the names of those that were asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: list[str] = []

    def measure(choice: NetChoice, net: NetFacts, folder: str, *, gpu: str) -> NetSpeeds:
        names.append(gpu)
        return speeds().model_copy(update={"processor": gpu})

    monkeypatch.setattr(window_choice, "speeds_here", measure)
    return names


def test_windows_on_a_gpu_are_those_that_it_was_fastest_with_in_its_own_memory(measured: list[str]) -> None:
    for _ in range(2):  # with little of this machine's memory, in which the net is not
        plan = chosen(2 * GIB, 1, on_gpu=True, gpu=H100, shape=HUGE)
        assert (plan.window, plan.channels_last) == ((144, 144, 144), True)
        assert "times as fast as windows of 80 × 80 × 80" in plan.notes.windows
    assert measured == [H100.name]  # once
    small = Gpu("Tesla M60", 3 * GIB)
    plan = chosen(64 * GIB, 1, on_gpu=True, gpu=small, shape=HUGE)
    assert measured == [H100.name, small.name]
    assert math.prod(plan.window) < 144**3
    assert gpu_bytes(plan, speeds()) <= small.num_bytes
    assert "a GPU, for which this site has 3.0 GiB" in plan.notes.windows
    tiny = chosen(0.4 * GIB, 1, on_gpu=True, gpu=H100, shape=HUGE)  # too little memory beside the GPU for any
    assert (tiny.window, tiny.notes.windows) == ((80, 80, 80), "")


def test_a_gpu_that_could_not_be_measured_is_asked_again_by_the_next_plan(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    working = window_choice.speeds_here
    monkeypatch.setattr(window_choice, "speeds_here", lambda *arguments, **more: None)
    assert chosen(on_gpu=True, gpu=H100, shape=HUGE).window == (80, 80, 80)
    assert f"windows of net blur could not be timed on {H100.name}; the net's own are taken" in caplog.messages
    monkeypatch.setattr(window_choice, "speeds_here", working)
    assert chosen(on_gpu=True, gpu=H100, shape=HUGE).window == (144, 144, 144) and measured == [H100.name]


def test_on_a_gpu_less_is_not_worth_measuring_and_speeds_of_a_core_choose_nothing(measured: list[str]) -> None:
    plan = chosen(on_gpu=True, gpu=H100, shape=(700, 700, 700))
    assert (plan.window, plan.notes.windows, measured) == ((80, 80, 80), "", [])


@pytest.mark.parametrize(
    ("rates", "levels", "taken"),
    [
        ({"tf32": 0.6, "bfloat16": 0.4}, {"tf32": 0, "bfloat16": 1}, "bfloat16"),
        ({"tf32": 0.3, "bfloat16": 0.4}, {"tf32": 0, "bfloat16": 1}, "tf32"),
        ({"tf32": 0.6, "bfloat16": 0.4}, {"tf32": 0, "bfloat16": 2}, "tf32"),
        ({"tf32": 0.6, "bfloat16": 0.4}, {"tf32": 3, "bfloat16": 2}, "float32"),
    ],
)
def test_the_fastest_precision_on_a_gpu_is_taken_of_those_that_change_little_there(
    rates: dict[str, float],
    levels: dict[str, int],
    taken: str,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = {(layout, name): (rate, 250) for name, rate in rates.items() for layout in (False, True)}
    monkeypatch.setattr(f"{__name__}.COSTS", COSTS | costs)
    monkeypatch.setattr(window_choice, "has_bfloat16", lambda: False)  # of the processor beside it
    monkeypatch.setattr(window_choice, "_precision_difference", _precision_difference)
    asked = []

    def measure(
        choice: NetChoice, normalise: Normalise, net: NetFacts, folder: str, *, precision: str, device: str
    ) -> PrecisionDifference:
        asked.append((precision, device))
        return PrecisionDifference(normalise=normalise, relative=0.002, levels=levels[precision], share=0.13)

    monkeypatch.setattr(window_choice, "difference_here", measure)
    plan = chosen(on_gpu=True, gpu=H100, shape=WORTH_A_GPU, settings=[AUTO])
    assert (plan.precision, asked) == (taken, [("tf32", "cuda"), ("bfloat16", "cuda")])
    assert (f"{taken}, " in plan.notes.precision) == (taken != "float32")
    told = chosen(on_gpu=True, gpu=H100, shape=WORTH_A_GPU)
    assert told.precision == "float32"
    assert (f"infer.precision=auto would take {taken}" in told.notes.precision) == (taken != "float32")


@pytest.mark.parametrize("gpu", [None, H100])
@pytest.mark.parametrize(("factor", "most"), [(1.0, 7200.0), (40.0, 7200.0), (None, None)])
def test_a_block_on_a_gpu_that_nobody_timed_is_no_longer_than_a_slow_one_may_take(
    gpu: Gpu | None, factor: float | None, most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = None if factor is None else slower(factor)
    monkeypatch.setattr(window_choice, "known_speeds", lambda *arguments: known)
    monkeypatch.setattr(window_choice, "speeds_here", lambda *arguments, **more: None)
    plan = chosen(on_gpu=True, gpu=gpu, shape=HUGE)
    assert plan.has_slabs
    if known is None or most is None:
        assert math.prod(plan.shard) <= 512**3
    else:
        assert block_seconds(plan, known) <= most  # of a core, which is a tenth of the slowest GPU
