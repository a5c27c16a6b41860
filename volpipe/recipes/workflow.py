"""The flow: a recipe of several stages, each reading what an earlier one makes, and keys that several kinds share.

Not here: reading the file (workflow.recipe), whether the stages fit their volumes (plan), or running them (execute).

    [[stage]]                      [[stage]]
    name = "restore"               name = "scores"
    recipe = "superres_z4"         kind = "evaluate"
                                   reference = "truth.n5/raw"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.recipes.inference import ArrayInput, Input, Windows
from volpipe.recipes.toml import Section, UserPath, load_tree
from volpipe.recipes.training import TrainRecipe

VOLUME = "volume"  # what a stage reads that reads the command's argument
Tree = dict[str, Any]  # Any: TOML values, checked by `typed`


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]  # part of paths, and of CSV
Makes = Literal["volume", "weights", "scores"]


class UserFunction(Section):
    """A Python function over blocks of numpy."""

    function: UserPath
    """`file.py:function` or `module:function`; the code runs with your rights, on the workers."""
    halo: Triple = (0, 0, 0)
    """How far (z, y, x) the function looks; a halo that does not fit it is noticed over random voxels, and refused."""
    options: dict[str, Any] = Field(default_factory=dict)  # Any: whatever the function takes
    """Keyword arguments of the function."""


class OverBlocks(Section):
    """The keys of a stage that makes a volume block by block."""

    input: Input = Input()
    """Which array, level, channel and box (`roi`) is read, as of a run."""
    windows: Windows = Windows()
    """How large blocks are, as of a run; the result does not depend on it."""


@dataclass(frozen=True)
class Link:
    """A key, beside `input`, whose `value` may be an earlier stage that `makes` what is needed: NAME, or NAME/ARRAY.

    The stage begins when that one is complete. A file of the same name is reached as ./NAME, unless the value
    `is_stage` for sure.
    """

    key: str
    value: str
    makes: Makes = "volume"
    is_stage: bool = False

    @property
    def stage(self) -> str:
        return self.value.partition("/")[0]


@dataclass(frozen=True)
class FlowStage:
    """One stage: `reads` is the name of an earlier one, or "volume"; `choice` is what to do, checked by its kind.

    `array` is what it reads of that stage, where it makes several; `beside` has the other stages that it needs.
    `for_net` returns the choice of a run whose net the first of these trains, by the recipe of a training of it.
    """

    name: str
    kind: str
    reads: str
    choice: Any  # Any: the keys of its kind
    array: str = ""
    beside: tuple[str, ...] = ()
    for_net: Callable[[TrainRecipe], Section] | None = None

    @property
    def input(self) -> ArrayInput | None:
        """The section that says which array is read; None for a kind that has none."""
        return getattr(self.choice, "input", None)


@dataclass(frozen=True)
class Flow:
    """The stages of the file `source`, each after the one that it reads."""

    source: str
    stages: tuple[FlowStage, ...]


def has_stages(path: Path) -> bool:
    """Return whether the TOML file at `path` is a recipe of several stages.

    Raises:
        RecipeError: there is no such file, or it is no TOML.
    """
    return "stage" in load_tree(path)


@contextmanager
def named(stage: str) -> Iterator[None]:
    """Begin what our errors say with the name of the stage that they are about."""
    try:
        yield
    except VolpipeError as error:
        error.args = (f"stage {stage}: {error}",)
        raise
