"""Factor: a block of the volume becomes window tensors, normalised and compressed, one chunk each.

Not here: where windows lie (grid) or how tensors are laid out (scratch).
"""

from __future__ import annotations

from volpipe.inference.intensity import Affine
from volpipe.inference.scratch import Tensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import StreamedWindows
from volpipe.volumes.volume import Volume

WINDOWS_AT_ONCE = 16  # bounds the memory of a task


def factor(selection: Selection, volume: Volume, normalise: Affine, tensors: Tensors, block: int) -> str:
    """Write the selected window tensors of `block`, cut from `volume` and mirrored at its faces.

    Return the fingerprint of the voxels.
    """
    plan = selection.plan
    source = StreamedWindows(volume, plan.lattice, normalise, selection.input_box, padding=plan.net.padding)
    numbers = selection.windows_of(block)
    size = len(numbers) if plan.recipe.tensors.format == "zarr3" else WINDOWS_AT_ONCE
    for start in range(0, len(numbers), size):
        part = numbers[start : start + size]
        tensors.write_windows(part, source.read(part))
    return source.fingerprint(block)
