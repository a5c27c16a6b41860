"""Whether numbers of labels are objects, as they are meant, or classes of which many objects have one.

Not here: whether voxels are labels at all (values), or where they lie (orientation). What is looked at is a box in the
middle, in which parts that touch nowhere are counted, and a sample of the whole, which says how many numbers there are.
"""

from __future__ import annotations

import logging

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box
from volpipe.geometry.labels import Ignore, is_ignored
from volpipe.units import count
from volpipe.volumes.orientation import middle_box
from volpipe.volumes.values import take_sample
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

MOST_CLASSES = 20  # numbers that classes may be
LEAST_PART = 27  # voxels of a part that counts: less is noise of whoever labelled
PARTS = 4.0  # of a number, on the mean: of real objects in such boxes 1.0 to 1.6 (2026-11)
AS_OBJECTS = (
    "`volpipe segment LABELS --set input.kind=foreground --set objects.method=components --set input.range=[0,1]` "
    "numbers parts that touch nowhere"
)


def class_notes(labels: Volume, ignore: Ignore, within: Box | None = None) -> list[str]:
    """Return a sentence if `labels`, which are meant as objects, look like a map of classes, or are one object alone.

    Args:
        ignore: labels that do not count.
        within: the part that is looked at; all without.
    """
    sample, box = take_sample(labels, within), middle_box(labels, labels, within)
    if sample is None or box is None:
        return []
    try:
        data = labels.open(live=True).read(box)[0]
    except (VolpipeError, OSError) as error:  # workers name what they cannot read
        log.info("the middle of %s is not looked at: %s", labels, error)
        return []
    values = np.concatenate([part[(part != 0) & ~is_ignored(part, ignore)] for part in (data, *sample.boxes)])
    unique, nums = np.unique(values, return_counts=True)
    numbers = unique[nums >= LEAST_PART].tolist()
    if not 0 < len(numbers) <= MOST_CLASSES:
        return []
    num_parts, seen = _num_parts(np.where(np.isin(data, numbers), data, 0)), ", ".join(map(str, numbers))
    if len(numbers) == 1:
        how = f"in {count(num_parts, 'part')} that touch nowhere " if num_parts > 1 else ""
        return [
            f"{labels} has one label alone, {seen}, {how}in all that was looked at, and labels of objects have a "
            f"number for each object: as one object they say next to nothing. If {seen} is a class, {AS_OBJECTS}"
        ]
    if num_parts < PARTS * len(numbers):
        return []
    return [
        f"{labels} looks like a map of classes: its labels {seen} lie in {num_parts:,} parts that touch nowhere, by a "
        f"box in the middle, and labels of objects have a number for each object. {AS_OBJECTS}; classes are learnt "
        "with classes.names, and scored with --classes"
    ]


def _num_parts(labels: np.ndarray) -> int:
    """Return the number of parts of `labels` (z, y, x) of one number each, that touch no other such at all."""
    import cc3d

    values, number = np.unique(labels, return_inverse=True)  # in few bits, whatever the type of the labels
    compact = number.reshape(labels.shape).astype(np.uint16) + np.uint16(values[0] != 0)
    parts = cc3d.connected_components(compact, connectivity=26)
    return int((np.bincount(parts.ravel())[1:] >= LEAST_PART).sum())
