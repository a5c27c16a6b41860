"""What a plan says of the volume that its run will make: the same that opening it says once it is there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from plans import facts, volume

from volpipe.errors import PlanError
from volpipe.inference.output import create_output, planned_volume
from volpipe.inference.plan import Plan, make_plan
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume


def plan_into(out: Path, *settings: str, channels: int = 1, voxel: tuple[float, float, float] | None = None) -> Plan:
    net = facts(out_channels=channels, scale=(2, 1, 1), intensity="unit")
    recipe = load_recipe(None, [*settings, "output.levels=2"])
    return make_plan(recipe, volume((40, 50, 60), voxel_size_nm=voxel), net, out=out)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("voxel", [None, (30.0, 8.0, 8.0)])
@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("ome-zarr-0.5", "auto"),
        ("ome-zarr-0.6", "auto"),
        ("ome-zarr-0.5", "gzip"),
        ("ome-zarr-0.4", "auto"),
        ("zarr2", "raw"),
        ("n5", "auto"),
    ],
)
def test_a_promised_volume_is_the_one_that_is_found(
    tmp_path: Path, form: str, codec: str, voxel: tuple[float, float, float] | None, channels: int
) -> None:
    settings = [f"output.format={form}", f"output.codec={codec}", "input.roi=4:40,:,8:60"]
    plan = plan_into(tmp_path / ("out.n5" if form == "n5" else "out.zarr"), *settings, channels=channels, voxel=voxel)
    create_output(plan, {})
    for level in range(3):
        expected, found = asdict(planned_volume(plan, level)), asdict(open_volume(plan.out, level=level))
        for words in ("channel_names", "notes"):  # which a complete output alone has, and remarks on what it lacks
            expected.pop(words), found.pop(words)
        # All else is known before it is there.
        assert (expected.pop("is_planned"), found.pop("is_planned")) == (True, False)
        assert found == expected


def test_a_level_that_there_will_not_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"will have no level 3; its levels are 0 to 2"):
        planned_volume(plan_into(tmp_path / "out.zarr"), 3)
