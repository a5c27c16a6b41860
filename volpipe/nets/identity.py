"""What a net is: what it was built from, and what it gives for a small fixed window.

Two nets that compute otherwise have no measured facts, run or resume in common, whatever makes them differ: their
source, a file that they read while they were built, a module on PYTHONPATH, the environment, an attribute. Weights are
compared by their own hash (load). Parts of this are exact; the output is compared with a tolerance, for machines sum in
other orders: a run that a laptop plans goes on at a cluster. Files are compared as far as both know them, for what is
opened may depend on what a process had imported before.

Not here: the source of a net (files), or which files it opens (user_code).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

if TYPE_CHECKING:
    import torch
    from torch import nn

# What of torch's own layers decides what they compute, beside their tensors; of any release.
OF_LAYERS = (
    "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "output_padding", "transposed", "eps",
    "negative_slope", "num_groups", "upscale_factor", "downscale_factor", "scale_factor", "size", "mode",
    "align_corners", "ceil_mode", "count_include_pad", "normalized_shape", "num_heads", "batch_first", "approximate",
    "alpha", "lambd", "min_val", "max_val", "threshold", "value", "dim", "output_size", "track_running_stats",
)  # fmt: skip
CUBES = (16, 32, 48, 64, 96)  # windows that are tried, in voxels along each axis
LARGE = 30.0  # times the usual values, in a second window, for what acts on large ones alone
NUM_SAMPLES = 64  # of the output's values
SAME = 0.01  # of the largest output: far more than other sums make, far less than another factor does
DIGITS, COARSE_DIGITS = 5, 2
SEED = 53


class NetIdentity(BaseModel):
    """The identity of a net, by which it differs from others of the same weights and source.

    Attributes:
        layers: SHA-256 of what torch's own layers have beside tensors, such as a dilation; "" where nothing is known.
        files: SHA-256 by name of each file that the net's code opened or imported from a user's folder.
        output: values for a fixed window and fixed weights; none where it takes none of those tried.
        attributes: SHA-256 of all numbers and tensors of its modules; it is of this machine and is not stored.
        members: those of the nets of an ensemble, in its order, which has nothing else.
    """

    model_config = ConfigDict(frozen=True)

    layers: str = ""
    files: dict[str, str] = Field(default_factory=dict)
    output: tuple[float, ...] = ()
    attributes: str = Field("", exclude=True)
    members: tuple[NetIdentity, ...] = ()

    @model_serializer(mode="wrap")
    def _of_net(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Return the identity as a dictionary, with members only of an ensemble."""
        tree: dict[str, object] = dump(self)
        return tree if self.members else {key: value for key, value in tree.items() if key != "members"}

    @property
    def digest(self) -> str:
        """A hash of the whole identity, for the cache of this machine, on which outputs are rounded alike."""
        attributes = " ".join([self.attributes, *(each.attributes for each in self.members)])
        return hashlib.sha256(f"{self.form} {attributes}".encode()).hexdigest()

    @property
    def form(self) -> str:
        """A hash of what decides how long the net takes, whatever its weights."""
        if self.members:
            return hashlib.sha256(" ".join(each.form for each in self.members).encode()).hexdigest()
        largest = max(map(abs, self.output), default=0.0) or 1.0
        output = [round(value / largest, COARSE_DIGITS) for value in self.output]
        return hashlib.sha256(f"{self.layers} {self.files} {output}".encode()).hexdigest()

    def differences(self, other: NetIdentity) -> list[str]:
        """Return a sentence for each difference of the net `other` from this one; none of nets that compute alike."""
        pairs = enumerate(zip(self.members, other.members, strict=False), 1)
        of_members = [f"net {i} of the ensemble: {each}" for i, (own, now) in pairs for each in own.differences(now)]
        if of_members:
            return of_members
        files = [name for name, digest in self.files.items() if other.files.get(name, digest) != digest]
        sentences = [f"{name}, from which it is built, changed" for name in files]
        if self.layers and other.layers and self.layers != other.layers:
            sentences.append("its layers are others")
        if not sentences and self.output and other.output and not _is_near(self.output, other.output):
            sentences.append(
                "it gives another output for the same window and weights, by what it reads as it is built, or by an "
                "option in the environment"
            )
        return sentences


def _is_near(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two outputs differ by rounding alone; each half is of a window of its own."""
    if len(one) != len(other):
        return False
    half = len(one) // 2
    for part in (slice(0, half), slice(half, None)):
        first, second = np.array(one[part]), np.array(other[part])
        if np.abs(first - second).max(initial=0) > SAME * np.abs(first).max(initial=0):
            return False
    return True


def layers_hash(net: nn.Module) -> str:
    """Return the SHA-256 of what torch's own layers in `net` have beside their tensors."""
    digest = hashlib.sha256()
    for name, layer in net.named_modules():
        if type(layer).__module__.startswith("torch.nn."):
            values = {key: _numbers_and_words(getattr(layer, key, None)) for key in OF_LAYERS}
            digest.update(f"{name} {type(layer).__name__} {values}\n".encode())
    return digest.hexdigest()


def attributes_hash(net: nn.Module) -> str:
    """Return the SHA-256 of the numbers, words and tensors in all modules of `net`, whether or not they are saved."""
    import torch

    digest = hashlib.sha256()
    for name, layer in net.named_modules():
        own = {key: value for key, value in vars(layer).items() if key not in ("_parameters", "_modules")}
        digest.update(f"{name} {type(layer).__qualname__}\n".encode())
        for place, value in _values(own, ""):
            digest.update(f"{place} ".encode())
            if isinstance(value, torch.Tensor):
                plain = value.detach().cpu().contiguous()
                digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
                digest.update(plain.flatten().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(repr(value).encode())
    return digest.hexdigest()


def _values(value: object, place: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the numbers, words, arrays and tensors in `value` with their places, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        if not (value.is_meta or value.is_quantized or value.layout is not torch.strided):
            yield place, value
    elif isinstance(value, np.ndarray):
        yield place, (value.shape, value.dtype.str, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest())
    elif isinstance(value, bool | int | float | complex | str | bytes | None):
        yield place, value
    elif isinstance(value, Mapping) and depth < 4:
        for key, entry in value.items():
            yield from _values(entry, f"{place}.{key}", depth + 1)
    elif isinstance(value, list | tuple) and depth < 4:
        for i, entry in enumerate(value):
            yield from _values(entry, f"{place}.{i}", depth + 1)


def _numbers_and_words(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_numbers_and_words, value))
    return value if isinstance(value, bool | int | float | str | None) else None


def fixed_output(net: nn.Module, channels: Sequence[int], fixed: Sequence[int]) -> tuple[float, ...]:
    """Return values of the output of `net` for fixed windows and fixed weights; none where it takes none of them.

    That is computed by one thread of the CPU, since sums of several are others in their last digits. Weights are
    compared by themselves, and would hide what else a net does: those of a training saturate it, and random ones are
    others each time.

    Args:
        channels: of the windows, the likely number first.
        fixed: the only size (z, y, x) that it takes, 0 along an axis where it takes others.
    """
    import torch

    with torch.random.fork_rng(devices=[]), torch.inference_mode(), _fixed_weights(net), _one_thread():
        torch.default_generator.manual_seed(SEED)
        for number in channels:
            for size in CUBES if not all(fixed) else (0,):
                shape = (number, *(only or size for only in fixed))
                noise = np.random.default_rng(SEED).uniform(-1, 1, (1, *shape)).astype(np.float32)
                values = [_sampled(net, window) for window in (noise, LARGE * noise)]
                if all(values):
                    return tuple(value for each in values for value in each)
    return ()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sampled(net: Callable[[torch.Tensor], torch.Tensor], window: np.ndarray) -> list[float]:
    """Return some values of the output for a `window`, and what sums up all; none where the net does not take it."""
    import torch

    try:
        out = net(torch.from_numpy(window.copy()))
    except (Exception, SystemExit):  # whatever the net's code makes of such a window
        return []
    if not isinstance(out, torch.Tensor) or not out.numel() or out.is_complex():
        return []
    return samples(out.detach().cpu().double().numpy())


def samples(output: np.ndarray) -> list[float]:
    """Return some of the values of an `output`, and what sums up all."""
    values = np.nan_to_num(output.astype(np.float64).ravel(), nan=0.0, posinf=1e30, neginf=-1e30)
    places = np.linspace(0, len(values) - 1, min(NUM_SAMPLES, len(values))).round().astype(int)
    sums = [values.mean(), np.abs(values).mean(), values.min(), values.max()]
    return [float(f"{value:.{DIGITS}g}") for value in (*sums, *values[places])]


@contextlib.contextmanager
def _fixed_weights(net: nn.Module) -> Iterator[None]:
    """Give the parameters of `net` fixed values meanwhile, and then its own again."""
    import torch

    noise = np.random.default_rng(SEED).standard_normal(4099).astype(np.float32)
    own = [(each.data, each.detach().clone()) for each in net.parameters() if each.is_floating_point()]
    try:
        for i, (values, _) in enumerate(own):
            inputs = max(1, values[0].numel()) if values.dim() > 1 else 1
            fixed = np.resize(np.roll(noise, i), values.numel()) / math.sqrt(inputs)
            values.copy_(torch.from_numpy(fixed.reshape(tuple(values.shape))))
        yield
    finally:
        for values, before in own:
            values.copy_(before)
