"""Samples: pairs of a net's input and the truth, each a function of the training's seed and of its own number.

Not here: learning from them (training.loop). So a resumed training sees the same samples, and each can be looked at
again; nothing is shuffled, and the only state is a cache of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.inference.intensity import Affine, to_dtype
from volpipe.inference.roi import find_part
from volpipe.inference.scratch import SOURCE_KEY
from volpipe.inference.statistics import affine
from volpipe.recipes.inference import Normalise
from volpipe.recipes.training import Data, TrainRecipe
from volpipe.training.data.dataset import WindowDataset
from volpipe.training.data.degrade import blurred, context, degrade
from volpipe.training.data.targets import targets
from volpipe.training.data.volumes import check_finite, check_holds, open_data, resolve_address, seen_from
from volpipe.volumes.identity import real_place
from volpipe.volumes.volume import Reader, Volume, open_volume

AXES = "zyx"
CACHE_BYTES = 1 << 30  # of decoded chunks of each volume
MAX_DRAWS = 1000  # of a window outside of the held-out boxes, before the recipe is refused


@dataclass(frozen=True)
class Sample:
    """One pair: the net's `inputs` (c, z, y, x) and the `truth` (c, z * scale, ...), both float32, normalised.

    The truth of labels is their `targets`, a channel for each offset.
    """

    inputs: np.ndarray
    truth: np.ndarray


@dataclass(frozen=True)
class SampleSource:
    """An open volume to draw windows from.

    Attributes:
        volume: the volume, or the array of its stored windows.
        held_out: the box that is validated, None without.
        closed: boxes that no window may touch: those held out of this volume by any `[[data]]`.
        normalise: of its values; the identity for stored windows, which are normalised.
        stored: the stored windows, None where windows are cut from the volume.
        labels: of the volume's voxels, None where the truth is the volume itself.
        weight: factor on its share of the windows, which is else that of its size.
    """

    volume: Volume
    held_out: Box | None
    normalise: Affine
    stored: WindowDataset | None = None
    labels: Volume | None = None
    weight: float = 1.0
    closed: tuple[Box, ...] = ()

    @property
    def shape(self) -> Triple:
        """Voxels (z, y, x) of the volume."""
        return self.volume.spatial_shape if self.stored is None else triple(self.stored.lattice.shape)

    @cached_property
    def reader(self) -> Reader:
        return self.volume.open(cache_bytes=CACHE_BYTES)

    @cached_property
    def label_reader(self) -> Reader | None:
        return None if self.labels is None else self.labels.open(cache_bytes=CACHE_BYTES)

    def labels_in(self, box: Box) -> np.ndarray | None:
        """Return the labels (z, y, x) of `box`, which lies in the volume; None without labels."""
        return None if self.label_reader is None else self.label_reader.read(box)[0]

    def is_free(self, box: Box) -> bool:
        """Return whether `box` lies outside of all held-out boxes."""
        return all((box & closed).is_empty for closed in self.closed)


class Sampler:
    """The samples of a training, by number.

    Args:
        search_path: folder that the recipe's relative names count from.

    Raises:
        VolpipeError: a volume is missing, or holds no window.
    """

    def __init__(self, recipe: TrainRecipe, scale: Triple, search_path: str = "") -> None:
        self.recipe, self.scale = recipe, scale
        self.shape = triple(n * s for n, s in zip(recipe.samples.shape, scale, strict=True))
        self.context = context(recipe.degrade.kind, scale)
        self.sources = open_sources(recipe, search_path)
        for source in self.sources:
            self._check_holds(source)
        sizes = np.array([math.prod(source.shape) * source.weight for source in self.sources], float)
        self.shares = sizes / sizes.sum()

    def sample(self, number: int) -> Sample:
        """Return sample `number`, the same each time."""
        rng = np.random.default_rng((self.recipe.train.seed, number))
        place_rng = np.random.default_rng((self.recipe.train.seed, number // self.recipe.samples.stay, 1))
        source = self.sources[place_rng.choice(len(self.sources), p=self.shares)]
        if source.stored is not None:
            return self._pair(source, self._draw_stored(source, source.stored, rng), None, rng)
        box = self._draw_box(source, place_rng, rng)
        return self._pair(source, self._read(source, box), source.labels_in(box), rng)

    def pair(self, source: SampleSource, box: Box) -> Sample:
        """Return the sample of `box` of `source`, without flips and changes of intensity."""
        return self._pair(source, self._read(source, box), source.labels_in(box), None)

    def _pair(
        self, source: SampleSource, data: np.ndarray, labels: np.ndarray | None, rng: np.random.Generator | None
    ) -> Sample:
        """Return the sample of `data`, which has its `context`; flips and changes of intensity are drawn from `rng`."""
        if rng is None:
            gain, offset = np.float32(1), np.float32(0)
            inputs = self._degrade(data, source, np.random.default_rng(self.recipe.train.seed))
        else:
            turn = self._draw_turn(rng)
            data, labels = turn(data), None if labels is None else turn(labels)
            inputs = self._degrade(data, source, rng)
            gain, offset = self._intensity(rng)
        if labels is not None:  # flipped before their targets: an offset has a direction
            return Sample(source.normalise.apply(inputs) * gain + offset, self.targets(labels))
        inner = tuple(slice(c, n - c) for c, n in zip(self.context, data.shape[1:], strict=True))
        inputs, truth = (source.normalise.apply(part) * gain + offset for part in (inputs, data[(slice(None), *inner)]))
        return Sample(inputs, truth)

    def _draw_turn(self, rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
        """Return a flip of arrays (..., z, y, x) along axes drawn from `rng`, then with luck an exchange of y and x."""
        choice = self.recipe.samples
        flips = tuple(AXES.index(axis) - 3 for axis in choice.flips if rng.random() < 0.5)
        swap = choice.swap and rng.random() < 0.5

        def turn(data: np.ndarray) -> np.ndarray:
            data = np.flip(data, flips)
            return np.ascontiguousarray(data.swapaxes(-1, -2) if swap else data)

        return turn

    def targets(self, labels: np.ndarray) -> np.ndarray:
        """Return the targets of `labels` (z, y, x): (offset, z, y, x), float32."""
        choice = self.recipe.affinities
        return targets(labels, choice.offsets, choice.ignore).astype(np.float32)

    def degraded(self, source: SampleSource, box: Box, rng: np.random.Generator) -> np.ndarray:
        """Return the degraded voxels of `box` of `source`, (z, y, x), in units of the volume."""
        return np.asarray(self._degrade(self._read(source, box), source, rng)[0])

    def _read(self, source: SampleSource, box: Box) -> np.ndarray:
        """Return the voxels of `box` with the context of its degradation, (c, z, y, x), float32."""
        data: np.ndarray = source.reader.read_mirrored(self._with_context(box)).astype(np.float32)
        check_finite(source.volume, data, box)
        return data

    def _with_context(self, box: Box) -> Box:
        return Box(
            tuple(a - c for a, c in zip(box.start, self.context, strict=True)),
            tuple(b + c for b, c in zip(box.stop, self.context, strict=True)),
        )

    def _draw_stored(self, source: SampleSource, stored: WindowDataset, rng: np.random.Generator) -> np.ndarray:
        """Return a stored window outside of the held-out boxes, (c, z, y, x)."""
        for _ in range(MAX_DRAWS):
            number = int(rng.integers(len(stored)))
            if source.is_free(stored.box(number)):
                window: np.ndarray = stored[number].numpy()
                return window
        raise self._nothing_free(source)

    def _draw_box(self, source: SampleSource, place_rng: np.random.Generator, rng: np.random.Generator) -> Box:
        """Return the box of a window: anywhere by `place_rng`, and with samples.stay near there by `rng`."""
        last_corner = tuple(n - s for n, s in zip(source.shape, self.shape, strict=True))
        for _ in range(MAX_DRAWS):
            corner = tuple(int(place_rng.integers(0, m + 1)) for m in last_corner)
            if self.recipe.samples.stay > 1:  # windows of one neighbourhood overlap, so that its chunks are read once
                near = [(max(0, c - s), min(m, c + s)) for c, s, m in zip(corner, self.shape, last_corner, strict=True)]
                corner = tuple(int(rng.integers(low, high + 1)) for low, high in near)
            box = Box.from_shape(self.shape).shift(corner)
            if source.is_free(self._with_context(box)):
                return box
        raise self._nothing_free(source)

    def _nothing_free(self, source: SampleSource) -> PlanError:
        boxes = " and ".join(map(str, source.closed))
        return PlanError(
            f"no window of {self.shape} voxels in {MAX_DRAWS} lay outside of what is held out of {source.volume}, "
            f"{boxes}; make samples.shape or data.held_out smaller"
        )

    def _check_holds(self, source: SampleSource) -> None:
        """Refuse a volume that is smaller than a window, and stored windows of another shape."""
        if source.stored is not None:
            expected = tuple(n + 2 * c for n, c in zip(self.shape, self.context, strict=True))
            if source.stored.lattice.seen != expected:
                raise PlanError(
                    f"the windows in {source.volume} have {source.stored.lattice.seen} voxels (z, y, x), "
                    f"samples.shape and the net's scale need {expected}; change samples.shape, or store others"
                )
            return
        check_holds(source.volume, self.shape)

    def _degrade(self, data: np.ndarray, source: SampleSource, rng: np.random.Generator) -> np.ndarray:
        """Return `data` degraded, in units of the volume."""
        choice, dtype = self.recipe.degrade, source.volume.dtype
        inputs = degrade(data, choice.kind, self.scale)
        if choice.blur:
            inputs = blurred(inputs, rng.uniform(0, choice.blur))
        if choice.noise:
            deviation = np.float32(rng.uniform(0, choice.noise))
            inputs = inputs + deviation * rng.standard_normal(inputs.shape, np.float32)
        if choice.uneven or choice.missing:
            inputs = inputs * self._slice_gains(inputs.shape[1], rng)
        return to_dtype(inputs, dtype).astype(np.float32) if choice.whole and dtype.kind in "iu" else inputs

    def _slice_gains(self, num_slices: int, rng: np.random.Generator) -> np.ndarray:
        """Return the factor of each slice of the input, (z, 1, 1), float32."""
        choice = self.recipe.degrade
        gains = rng.uniform(1 - choice.uneven, 1 + choice.uneven, num_slices)
        gains[rng.random(num_slices) < choice.missing] = 0
        return gains.astype(np.float32)[:, None, None]

    def _intensity(self, rng: np.random.Generator) -> tuple[np.float32, np.float32]:
        choice = self.recipe.samples
        if choice.gain == (1.0, 1.0) and not choice.offset:
            return np.float32(1), np.float32(0)
        return np.float32(rng.uniform(*choice.gain)), np.float32(rng.uniform(-choice.offset, choice.offset))


def open_sources(recipe: TrainRecipe, search_path: str) -> list[SampleSource]:
    """Return the volumes of `recipe`, each closed to windows where any entry of the same voxels holds out a box.

    Entries are of the same voxels by whatever names and levels of its group they name a volume.

    Raises:
        VolpipeError: as `open_source`.
    """
    sources = [open_source(data, recipe.normalise, search_path) for data in recipe.data]
    places = [real_place(source.volume) for source in sources]

    def closed(source: SampleSource, place: tuple[object, ...]) -> tuple[Box, ...]:
        others = (other for other, of_other in zip(sources, places, strict=True) if of_other == place)
        return tuple(seen_from(each.held_out, each.volume, source.volume) for each in others if each.held_out)

    return [replace(source, closed=closed(source, place)) for source, place in zip(sources, places, strict=True)]


def open_source(data: Data, normalise: Normalise, search_path: str) -> SampleSource:
    """Return the volume of `data`, opened, with its held-out box and its normalisation.

    Raises:
        VolpipeError: no such volume, a box outside of it, or a normalisation that needs measuring.
    """
    if data.stored:
        address = resolve_address(data.path, search_path)
        stored = WindowDataset.from_tensors(address, data.key or SOURCE_KEY)
        box = None if data.held_out is None else find_part(data.held_out, stored.lattice.shape)
        return SampleSource(open_volume(address, data.key or SOURCE_KEY), box, Affine(), stored, weight=data.weight)
    opened = open_data(data, normalise, search_path)
    applied = affine(normalise, opened.volume.dtype, None)
    return SampleSource(opened.volume, opened.held_out, applied, labels=opened.labels, weight=data.weight)
