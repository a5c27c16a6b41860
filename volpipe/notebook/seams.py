"""The seams of a run's output: the engine's score of each axis, and how neighbours differ across and beside faces.

Not here: the score (runs.seams), or runs.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from volpipe.errors import RunError, VolpipeError
from volpipe.notebook.pictures import Drawn
from volpipe.reporting.panels import Panel, curve
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.seams import (
    MEANING,
    THRESHOLD,
    Profile,
    SeamScore,
    blind_spot,
    seam_squares,
)
from volpipe.tables import html_table
from volpipe.workflow.driver import Report, RunWork
from volpipe.workflow.kinds import find_work

AXES = "zyx"


@dataclass(frozen=True, repr=False)
class Seams(Drawn):
    """The seam scores of an output, 1 where no step stands out at faces of windows, and the profiles across the faces.

    Attributes:
        scores: by axis; an axis without faces, or with too few of them for a score, is not there.
        profiles: mean square differences of neighbours by their distance from a face, of the same axes.
        note: what the scores do not see, "" where the halo is exact.
    """

    output: str
    scores: tuple[SeamScore, ...]
    profiles: tuple[Profile, ...]
    note: str = ""

    def __repr__(self) -> str:
        scores = ", ".join(f"{score.axis} {score.value:.2f}" for score in self.scores)
        line = f"<Seams of {self.output}: {scores or 'no faces to score'} ({self._verdict})>"
        return f"{line}\n  {self.note}" if self.note else line

    @property
    def _verdict(self) -> str:
        seen = [score.axis for score in self.scores if score.is_seam]
        if seen:
            return f"faces of windows may be seen along {', '.join(seen)}, above {THRESHOLD:g}"
        return f"{MEANING}, above {THRESHOLD:g} one may be seen" if self.scores else "one window along each axis"

    @property
    def has_picture(self) -> bool:
        return bool(self.scores)

    def panels(self) -> Iterator[list[Panel]]:
        """Yield the profile of each axis, the faces at 0."""
        if not self.scores:
            raise VolpipeError(f"{self.output} has no faces of windows to draw: {self._verdict}")
        values = {score.axis: score.value for score in self.scores}
        row = []
        for profile in self.profiles:
            first, *_, last = profile.distances
            image = curve([*zip(profile.distances, profile.differences, strict=True)], low=0.0, marked=0.0)
            caption = (
                f"across faces along {profile.axis}: score {values[profile.axis]:.2f}\nmean square of neighbours, 0 to "
                f"{max(profile.differences):.3g}, {first} to {last} voxels from the face"
            )
            row.append(Panel(caption, image))
        yield row

    def _html_table(self) -> str:
        rows = {axis: (axis, "no faces, or too few", "", "") for axis in AXES}
        for score in self.scores:
            seam = "may be seen" if score.is_seam else "as at other places" if score.is_of_tissue else "no step"
            rows[score.axis] = score.axis, f"{score.value:.3f}", f"{score.num_pairs:,}", seam
        head = ("axis", "score", "pairs of voxels", "seam")
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return html_table(head, rows.values(), caption=f"seams of {self.output}") + note


def seams(result: Report | str | Path) -> Seams:
    """Return the seams of a run's output; arguments as of `volpipe.seams`."""
    if isinstance(result, Report):
        folder, name = RunFolder(Path(result.folder)), str(result.plan.out)
    elif isinstance(result, str | Path):
        folder, name = RunFolder(RunFolder.find(result).path.absolute()), str(result)
    else:
        raise VolpipeError(
            f"seams are of the output of a run, not of {type(result).__name__}; give the report that vp.run returned, "
            "or the output's path"
        )
    work = find_work(folder)
    if not isinstance(work, RunWork):
        raise RunError(
            f"{name}: {folder.path} has no run of a net, which alone knows where windows met; name an output of vp.run "
            "that lies beside its run's folder"
        )
    if work.plan.recipe.output.kind == "labels":
        raise RunError(f"{name} holds labels, whose numbers say nothing of seams; score the image they were made from")
    if not work.is_complete:
        raise RunError(f"{name} is not complete, so that missing voxels would count as seams; run it to its end first")
    selection = folder.load_selection(work.plan)
    assert selection is not None  # of a complete run
    sample = seam_squares(selection)
    scores, profiles = tuple(each.score for each in sample), tuple(each.profile for each in sample)
    return Seams(Path(name).name, scores, profiles, blind_spot(work.plan))
