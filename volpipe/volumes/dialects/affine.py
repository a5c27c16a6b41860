"""Affine maps from voxels to the space around them, as files of medical images state them: size, origin, direction.

Not here: where a file keeps the map (nifti, nrrd). volpipe reads voxels along the file's own axes, and turns or mirrors
none. So a size is the length of a step along an axis, and the origin the place of the first voxel along these axes::

    columns of the map      steps along x, y, z          lengths of a voxel
    the directions D        columns of length 1          notes, unless they are those of the space
    the first voxel at t    D⁻¹ t                        origin: two volumes of one direction lie as they should
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from volpipe.volumes.storage.metadata import GUESSED_SIZE, Place, place, shown

OPPOSITES = {"R": "L", "L": "R", "A": "P", "P": "A", "S": "I", "I": "S"}
MAX_TILT = 0.1  # degrees, of rounding
LEAST_VOLUME = 1e-3  # of the box that three directions span, 1 where they are perpendicular


def decimals(values: np.ndarray) -> np.ndarray:
    """Return `values`, which may be of 32 bits, as the decimals that they were written for: 0.008, not 0.0080000004."""
    return np.array([float(str(value)) for value in values.ravel()]).reshape(values.shape)


def affine_place(
    steps: np.ndarray, first: np.ndarray | None, unit: str, space: str, *, guess: bool = False
) -> tuple[Place, tuple[str, ...]]:
    """Return the place of voxels, and what a user should know of their directions.

    Args:
        steps: along x, y and z, one in each column, (3, 3).
        first: the place of the first voxel, None where the file states none.
        unit: of both, "" where the file names none.
        space: what the axes of the space point to, such as "RAS"; "" where the file does not say.
        guess: whether lengths without a unit are mm.
    """
    sizes = np.sqrt((steps * steps).sum(axis=0))
    with np.errstate(all="ignore"):
        directions = steps / sizes
    volume = float(abs(np.linalg.det(directions))) if np.isfinite(directions).all() else 0.0
    if not np.isfinite(sizes).all() or volume < LEAST_VOLUME:
        rows = "; ".join(" ".join(f"{entry:g}" for entry in row) for row in steps.tolist())
        return Place(reason=f"its affine map, {rows}, spans no space"), ()
    shift: dict[str, float] = {}
    if first is not None and np.isfinite(first).all():
        shift = dict(zip("xyz", np.linalg.solve(directions, first).tolist(), strict=True))
    is_guess = guess and not unit
    scale = dict(zip("xyz", sizes.tolist(), strict=True))
    where = place(scale, shift, dict.fromkeys("xyz", "mm" if is_guess else unit))
    if is_guess and where.voxel_size_nm is not None:
        numbers = shown(sizes[::-1].tolist())
        reason = f"{GUESSED_SIZE}: it says {numbers} without a unit, taken as mm; input.voxel_size_nm gives another"
        where = replace(where, reason=reason)
    return replace(where, axcodes=_axcodes(directions, space)), direction_notes(directions, space)


def _axcodes(directions: np.ndarray, space: str) -> str:
    """Return to where x, y and z run, such as "RAS"; "" where the file does not say, or two run along one axis.

    Axes that are not perpendicular are made so first, as nibabel and MONAI do.
    """
    left, _, right = np.linalg.svd(directions)
    turn = left @ right
    nearest = np.abs(turn).argmax(axis=0).tolist()
    if not space or sorted(nearest) != [0, 1, 2]:
        return ""
    return "".join(_direction_letter(axis, turn[axis, column], space) for column, axis in enumerate(nearest))


def direction_notes(directions: np.ndarray, space: str) -> tuple[str, ...]:
    """Return how the axes x, y, z, whose `directions` are columns, lie in a space; () where they are its axes."""
    notes = []
    nearest = np.abs(directions).argmax(axis=0).tolist()
    cosines = [abs(float(directions[axis, column])) for column, axis in enumerate(nearest)]
    tilt = float(np.degrees(np.arccos(np.clip(min(cosines), 0, 1))))
    signs = [float(np.sign(directions[axis, column])) for column, axis in enumerate(nearest)]
    if nearest != [0, 1, 2] or min(signs) < 0 or tilt > MAX_TILT:
        ends = [_direction_letter(axis, sign, space) for axis, sign in zip(nearest, signs, strict=True)]
        oblique = f", oblique by up to {tilt:.1f}°" if tilt > MAX_TILT else ""
        notes.append(
            f"x runs to {ends[0]}, y to {ends[1]}, z to {ends[2]}{oblique}: voxels are read in the file's order, none "
            "is mirrored, exchanged or turned, and the origin is along these axes"
        )
    angles = np.degrees(np.arccos(np.clip(directions.T @ directions, -1, 1)))
    odd = [f"{angles[i, j]:.1f}°" for i, j in ((0, 1), (0, 2), (1, 2)) if abs(angles[i, j] - 90) > MAX_TILT]
    if odd:
        notes.append(f"its axes meet at {', '.join(odd)}; they are read as if they were perpendicular")
    return tuple(notes)


def _direction_letter(axis: int, sign: float, space: str) -> str:
    """Return to where an axis of `space` runs, in the direction of `sign`: a letter, or the axis itself."""
    if not space:
        return f"{'-' if sign < 0 else '+'}{'xyz'[axis]}"
    return OPPOSITES[space[axis]] if sign < 0 else space[axis]
