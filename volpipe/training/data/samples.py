"""Windows of a training: each is a place and a few numbers, a function of the training's seed and of its own number.

Not here: the pairs of tensors that are made of them (augment), or learning from those (training.loop). So a resumed
training sees the same windows, and each can be looked at again; nothing is shuffled, and the only state is a cache of
chunks.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from uuid import uuid4

import numpy as np

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.inference.intensity import Affine
from volpipe.inference.roi import find_part
from volpipe.inference.scratch import SOURCE_KEY
from volpipe.inference.statistics import affine
from volpipe.recipes.inference import Normalise
from volpipe.recipes.training import Data, TrainRecipe
from volpipe.training.data.dataset import WindowDataset
from volpipe.training.data.degrade import context
from volpipe.training.data.labelled import LabelledVoxels, are_sparse
from volpipe.training.data.volumes import (
    CACHE_BYTES,
    check_holds,
    closed_boxes,
    named,
    open_data,
    resolve_address,
)
from volpipe.volumes.decoded import decoded
from volpipe.volumes.volume import Reader, Volume, open_volume

AXES = "zyx"
BEND = 16  # voxels between the corners of a lattice of displacements
DEFOCUS = 2.0  # voxels, the largest standard deviation of the blur of a slice out of focus
MAX_DRAWS = 1000  # of a window outside of the held-out boxes, before the recipe is refused


@dataclass(frozen=True)
class Augmentation:
    """The numbers that are drawn for one window, by which `augment` changes its voxels.

    Attributes:
        flips: axes that are reversed, as numbers from -3 (z) to -1 (x); `swap`: whether y and x are exchanged then.
        bends: displacements (3, z, y, x) at the corners of a coarse lattice over the window, in voxels.
        slips: voxels (slice, 2) by which each slice is moved along y and x.
        blur: standard deviation in voxels of the input; `slice_blurs`: of each of its slices, along y and x.
        noise: standard deviation in grey levels; `key` is what its generator counts from.
        gains: the factor of each slice of the input.
        cuts: boxes of the input that show its mean.
        gain, offset: contrast and brightness after normalisation.
    """

    flips: tuple[int, ...] = ()
    swap: bool = False
    bends: np.ndarray | None = None
    slips: np.ndarray | None = None
    blur: float = 0.0
    slice_blurs: np.ndarray | None = None
    noise: float = 0.0
    key: int = 0
    gains: np.ndarray | None = None
    cuts: tuple[Box, ...] = ()
    gain: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class Window:
    """A window of a training: where it lies, and how it is changed.

    Attributes:
        box: its voxels of the truth, with the context of its degradation; it may reach outside of the volume.
        stored: its number where windows are stored.
    """

    source: SampleSource
    box: Box
    changes: Augmentation
    stored: int | None = None


@dataclass(frozen=True)
class SampleSource:
    """An open volume to draw windows from.

    Attributes:
        volume: the volume, or the array of its stored windows.
        held_out: the box that is validated, None without.
        test: the box that is scored at the end alone, None without.
        closed: boxes that no window may touch: those held out of this volume, or tested, by any `[[data]]`.
        normalise: of its values; the identity for stored windows, which are normalised.
        stored: the stored windows, None where windows are cut from the volume.
        labels: of the volume's voxels, None where the truth is the volume itself.
        weight: factor on its share of the windows, which is else that of its size.
        is_shared: whether it is read by the copy that trainings of this node share.
        part: the box that windows come from; None for all.
        extent: the box where the labels lie, of which no more is read; None for all.
        session: of whoever reads: chunks that another one decoded are compared with their files once more.
        annotated: names of the classes that the labels annotate; none for all.
    """

    volume: Volume
    held_out: Box | None
    normalise: Affine
    stored: WindowDataset | None = None
    labels: Volume | None = None
    weight: float = 1.0
    closed: tuple[Box, ...] = ()
    is_shared: bool = False
    part: Box | None = None
    extent: Box | None = None
    session: str = ""
    test: Box | None = None
    annotated: tuple[str, ...] = ()

    @property
    def shape(self) -> Triple:
        """Voxels (z, y, x) of the volume."""
        return self.volume.spatial_shape if self.stored is None else triple(self.stored.lattice.shape)

    @property
    def read_box(self) -> Box:
        """The box of which voxels are read."""
        return self.extent or Box.from_shape(self.shape)

    @property
    def room(self) -> Box:
        """The box that windows come from."""
        return self.part or Box.from_shape(self.shape)

    @property
    def label_dtype(self) -> np.dtype:
        """The type of the labels, which are there."""
        assert self.labels is not None
        return self.labels.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all voxels and labels in memory, as they are stored; labels at least as int32."""
        voxel = self.volume.num_channels * self.volume.dtype.itemsize
        return self.read_box.num_voxels * (voxel + (max(4, self.labels.dtype.itemsize) if self.labels else 0))

    @cached_property
    def reader(self) -> Reader:
        return self._copy.open(cache_bytes=CACHE_BYTES, session=self.session)

    @cached_property
    def label_reader(self) -> Reader | None:
        if self.labels is None:
            return None
        labels = decoded(self.labels, CACHE_BYTES) if self.is_shared else self.labels
        return labels.open(cache_bytes=CACHE_BYTES, session=self.session)

    @cached_property
    def _copy(self) -> Volume:
        """The volume, or a decoded copy of the box of it that is read."""
        return decoded(self.volume, CACHE_BYTES, self.read_box) if self.is_shared else self.volume

    def read(self, window: Window) -> np.ndarray:
        """Return the voxels of `window` (c, z, y, x) in their own type, mirrored at the volume's faces.

        Raises:
            PlanError: they are not finite.
        """
        if self.stored is not None and window.stored is not None:
            return self.stored[window.stored].numpy()
        first = (0, 0, 0) if self._copy is self.volume else self.read_box.start
        data = self.reader.read_mirrored(window.box.relative_to(first))
        if np.issubdtype(self.volume.dtype, np.floating) and not np.isfinite(data).all():
            raise PlanError(f"{self.volume} has NaN or infinite voxels in {window.box}; learn from a copy without them")
        return data

    def read_labels(self, box: Box) -> np.ndarray | None:
        """Return the labels (z, y, x) of `box` of the volume, where they lie; None without labels."""
        return None if self.label_reader is None else self.label_reader.read(box.relative_to(self.read_box.start))[0]

    def labels_in(self, box: Box) -> np.ndarray:
        """Return the labels (z, y, x) of `box` of the volume, which has some."""
        labels = self.read_labels(box)
        assert labels is not None
        return labels

    def is_free(self, box: Box) -> bool:
        """Return whether `box` lies outside of all held-out boxes."""
        return all((box & closed).is_empty for closed in self.closed)


class Sampler:
    """The windows of a training, by number.

    Args:
        search_path: folder that the recipe's relative names count from.
        is_trial: whether other trainings of this node read the same volumes.

    Raises:
        VolpipeError: a volume is missing, or holds no window.
    """

    def __init__(self, recipe: TrainRecipe, scale: Triple, search_path: str = "", *, is_trial: bool = False) -> None:
        self.recipe, self.scale = recipe, scale
        self.shape = triple(n * s for n, s in zip(recipe.samples.shape, scale, strict=True))
        self.context = context(recipe.degrade.kind, scale)
        sources = open_sources(recipe, search_path)
        with_context = tuple(n + 2 * c for n, c in zip(self.shape, self.context, strict=True))
        for source in sources:
            if source.stored is None:
                check_holds(source.volume, self.shape, source.room)
            elif source.stored.lattice.seen != with_context:
                raise PlanError(
                    f"the windows in {source.volume} have {source.stored.lattice.seen} voxels (z, y, x), samples.shape "
                    f"and the net's scale need {with_context}; change samples.shape, or store others"
                )
        sizes = np.array([math.prod(source.room.shape) * source.weight for source in sources], float)
        self.shares = sizes / sizes.sum()
        drawn = recipe.train.steps * recipe.train.batch * recipe.train.accumulate * math.prod(self.shape) * self.shares
        self.reads_whole = [
            source.stored is None and source.read_box.num_voxels <= n for n, source in zip(drawn, sources, strict=True)
        ]
        self.sources = [
            replace(source, is_shared=is_trial and whole)
            for whole, source in zip(self.reads_whole, sources, strict=True)
        ]
        self._about_labels = {id(source): self._labelled_share(source) for source in self.sources}
        self._labelled: dict[int, LabelledVoxels] = {}
        self._counting = threading.Lock()  # windows are drawn ahead by several threads

    def _labelled_share(self, source: SampleSource) -> float:
        """Return the share of the windows of `source` that are drawn about known labels."""
        choice = self.recipe.samples.labelled
        if source.labels is None:
            return 0.0
        if choice != "auto":
            return choice
        reader, own = source.label_reader, source.room.relative_to(source.read_box.start)
        assert reader is not None
        is_sparse = are_sparse(source.labels, own, lambda box: np.asarray(reader.read(box)[0]), self.recipe.ignore)
        return float(is_sparse)

    def is_sparse(self, source: SampleSource) -> bool:
        """Return whether windows of `source` are drawn about known labels."""
        return self._about_labels[id(source)] > 0

    def _labelled_voxels(self, source: SampleSource) -> LabelledVoxels:
        """Return the voxels of `source` with known labels about which windows may lie; counted once.

        Raises:
            PlanError: there are none.
        """
        within = source.room.grown(
            tuple(-edge for edge in self.recipe.samples.margin)
        )  # no loss is nearer to its faces
        with self._counting:
            known = self._labelled.get(id(source))
            if known is None:
                known = LabelledVoxels.count(within, source.closed, source.labels_in, self.recipe.ignore)
                self._labelled[id(source)] = known
        if not known.num:
            raise PlanError(
                f"the labels {source.labels} have no known voxel in {within}, outside of what is held out; give "
                "data.box where labels are, or classes.ignore (affinities.ignore) if other labels say that nothing is "
                "known"
            )
        return known

    def window(self, number: int) -> Window:
        """Return window `number`, the same each time."""
        rng = np.random.default_rng((self.recipe.train.seed, number))
        place_rng = np.random.default_rng((self.recipe.train.seed, number // self.recipe.samples.stay, 1))
        source = self.sources[place_rng.choice(len(self.sources), p=self.shares)]
        if source.stored is not None:
            stored = self._draw_stored(source, source.stored, rng)
            box = source.stored.box(stored)
        else:
            stored, box = None, self._with_context(self._draw_box(source, place_rng, rng))
        return Window(source, box, self._draw_changes(rng), stored)

    def plain(self, source: SampleSource, box: Box, rng: np.random.Generator | None = None) -> Window:
        """Return the window of `box` of `source`, degraded by numbers of `rng`, and else as it is."""
        rng = np.random.default_rng(self.recipe.train.seed) if rng is None else rng
        return Window(source, self._with_context(box), self._draw_degradation(rng, box.shape))

    def _draw_changes(self, rng: np.random.Generator) -> Augmentation:
        """Return the changes of a window of `samples.shape`."""
        choice = self.recipe.samples
        flips = tuple(AXES.index(axis) - 3 for axis in choice.flips if rng.random() < 0.5)
        swap = choice.swap and rng.random() < 0.5
        degradation = self._draw_degradation(rng, self.shape)
        gain, offset = 1.0, 0.0
        if choice.gain != (1.0, 1.0) or choice.offset:
            gain, offset = rng.uniform(*choice.gain), rng.uniform(-choice.offset, choice.offset)
        bends = slips = None
        if choice.elastic:
            corners = tuple(2 + n // BEND for n in self.shape)
            bends = (choice.elastic * rng.standard_normal((3, *corners))).astype(np.float32)
        if choice.misaligned and rng.random() >= 0.5:  # one slice alone is moved or, as often, all from it on
            slips = np.zeros((self.shape[0], 2), int)
            first, most = int(rng.integers(self.shape[0])), choice.misaligned
            slips[first : first + 1 if rng.random() < 0.5 else None] = rng.integers(-most, most + 1, 2)
        return replace(degradation, flips=flips, swap=swap, bends=bends, slips=slips, gain=gain, offset=offset)

    def _draw_degradation(self, rng: np.random.Generator, shape: Sequence[int]) -> Augmentation:
        """Return what the degradation draws for a window of `shape` voxels (z, y, x) of the truth."""
        choice = self.recipe.degrade
        sizes = tuple(n // s for n, s in zip(shape, self.scale, strict=True))
        blur = rng.uniform(0, choice.blur) if choice.blur else 0.0
        noise, key = (rng.uniform(0, choice.noise), int(rng.integers(2**31))) if choice.noise else (0.0, 0)
        gains = slice_blurs = None
        if choice.uneven or choice.missing:
            gains = rng.uniform(1 - choice.uneven, 1 + choice.uneven, sizes[0])
            gains[rng.random(sizes[0]) < choice.missing] = 0
        if choice.defocused:
            slice_blurs = rng.uniform(0.5, DEFOCUS, sizes[0]) * (rng.random(sizes[0]) < choice.defocused)
        cuts = tuple(_draw_cut(rng, sizes) for _ in range(choice.cut_out))
        return Augmentation(blur=blur, noise=noise, key=key, gains=gains, slice_blurs=slice_blurs, cuts=cuts)

    def _with_context(self, box: Box) -> Box:
        return Box(
            tuple(a - c for a, c in zip(box.start, self.context, strict=True)),
            tuple(b + c for b, c in zip(box.stop, self.context, strict=True)),
        )

    def _draw_stored(self, source: SampleSource, stored: WindowDataset, rng: np.random.Generator) -> int:
        """Return the number of a stored window outside of the held-out boxes."""
        for _ in range(MAX_DRAWS):
            number = int(rng.integers(len(stored)))
            if source.is_free(stored.box(number)):
                return number
        raise self._nothing_free(source)

    def _draw_box(self, source: SampleSource, place_rng: np.random.Generator, rng: np.random.Generator) -> Box:
        """Return the box of a window: anywhere by `place_rng`, and with samples.stay near there by `rng`."""
        last_corner = tuple(n - s for n, s in zip(source.room.shape, self.shape, strict=True))
        share = self._about_labels[id(source)]
        if share and (share == 1 or place_rng.random() < share):
            return self._draw_about_label(source, last_corner, place_rng, rng)
        for _ in range(MAX_DRAWS):
            corner = tuple(int(place_rng.integers(0, m + 1)) for m in last_corner)
            if self.recipe.samples.stay > 1:  # windows of one neighbourhood overlap, so that its chunks are read once
                near = [(max(0, c - s), min(m, c + s)) for c, s, m in zip(corner, self.shape, last_corner, strict=True)]
                corner = tuple(int(rng.integers(low, high + 1)) for low, high in near)
            box = Box.from_shape(self.shape).shift(corner).shift(source.room.start)
            if source.is_free(self._with_context(box)):
                return box
        raise self._nothing_free(source)

    def _draw_about_label(
        self, source: SampleSource, last_corner: Sequence[int], place_rng: np.random.Generator, rng: np.random.Generator
    ) -> Box:
        """Return the box of a window that has a known label within its margin; with samples.stay they share it."""
        labelled, margin = self._labelled_voxels(source), self.recipe.samples.margin
        for _ in range(MAX_DRAWS):
            place = labelled.draw(place_rng)
            corner = []
            for at, first, size, edge, most in zip(
                place, source.room.start, self.shape, margin, last_corner, strict=True
            ):
                low, high = at - first - size + edge + 1, at - first - edge
                corner.append(min(max(0, int(rng.integers(low, high + 1))), most))
            box = Box.from_shape(self.shape).shift(tuple(corner)).shift(source.room.start)
            if source.is_free(self._with_context(box)):
                return box
        raise self._nothing_free(source)

    def _nothing_free(self, source: SampleSource) -> PlanError:
        boxes = " and ".join(map(str, source.closed))
        return PlanError(
            f"no window of {self.shape} voxels in {MAX_DRAWS} lay outside of what is held out of {source.volume}, "
            f"{boxes}; make samples.shape or data.held_out smaller"
        )


def _draw_cut(rng: np.random.Generator, shape: Sequence[int]) -> Box:
    """Return a box in a window of `shape`, up to a third as long along each axis."""
    sizes = tuple(int(rng.integers(1, max(2, n // 3 + 1))) for n in shape)
    return Box.from_shape(sizes).shift(
        tuple(int(rng.integers(n - size + 1)) for n, size in zip(shape, sizes, strict=True))
    )


def open_sources(recipe: TrainRecipe, search_path: str) -> list[SampleSource]:
    """Return the volumes of `recipe`, each closed to windows as `closed_boxes` says.

    Raises:
        VolpipeError: as `open_source`.
    """
    sources = [open_source(data, recipe.normalise, search_path) for data in recipe.data]
    kept = [tuple(box for box in (source.held_out, source.test) if box is not None) for source in sources]
    volumes, session = [source.volume for source in sources], uuid4().hex
    closed = closed_boxes([*zip(volumes, kept, strict=True)])
    return [replace(source, closed=boxes, session=session) for source, boxes in zip(sources, closed, strict=True)]


def open_source(data: Data, normalise: Normalise, search_path: str) -> SampleSource:
    """Return the volume of `data`, opened, with its held-out box and its normalisation.

    Raises:
        VolpipeError: no such volume, a box outside of it, or a normalisation that needs measuring.
    """
    if data.stored:
        address = resolve_address(data.path, search_path)
        stored = WindowDataset.from_tensors(address, data.key or SOURCE_KEY)
        with named(data, "held_out"):
            box = None if data.held_out is None else find_part(data.held_out, stored.lattice.shape)
        return SampleSource(open_volume(address, data.key or SOURCE_KEY), box, Affine(), stored, weight=data.weight)
    opened = open_data(data, normalise, search_path)
    applied = affine(normalise, opened.volume.dtype, None)
    return SampleSource(
        opened.volume, opened.held_out, applied, labels=opened.labels, weight=data.weight, part=opened.part,
        extent=opened.extent, test=opened.test, annotated=data.annotated,
    )  # fmt: skip
