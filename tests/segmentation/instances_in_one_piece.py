"""Instances by the methods of the libraries, written plainly for a whole volume in memory.

`grouped` is `empanada.inference.postprocess` of empanada-dl 0.1.7 with an axis more, `flowed` is `compute_masks` of
cellpose 4.2.1.1 without its checks of flows and sizes. Both were held against those packages, 2026-11.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F


def grouped(channels: np.ndarray, foreground: float, peak: float, window: tuple[int, ...]) -> np.ndarray:
    """Return the place of the nearest centre for each voxel (z, y, x), from 1 on; 0 outside the foreground."""
    heat = F.threshold(torch.from_numpy(channels[1])[None, None].clone(), peak, -1.0)
    highest = F.max_pool3d(heat, window, stride=1, padding=[n // 2 for n in window])
    centres = torch.nonzero((heat[0, 0] > 0) & (heat == highest)[0, 0]).double()
    offsets = torch.from_numpy(channels[2:]).double().flatten(1).T
    grid = torch.stack(torch.meshgrid(*map(torch.arange, channels.shape[1:]), indexing="ij")).double().flatten(1).T
    nearest = torch.cat([torch.cdist(some, centres).argmin(1) for some in (grid + offsets).split(10_000)])
    return np.where(channels[0] > foreground, 1 + nearest.numpy().reshape(channels.shape[1:]), 0)


def flowed(channels: np.ndarray, cellprob: float, steps: int) -> np.ndarray:
    """Return the masks (z, y, x) of flows (z, y, x; z, y, x) and a foreground behind them."""
    inside = channels[3] > cellprob
    inds = np.nonzero(inside)
    flow = torch.from_numpy((channels[:3] * inside / 5.0).astype(np.float32))
    size = torch.tensor(inside.shape, dtype=torch.float32) - 1
    points = 2 * torch.tensor(np.stack(inds, -1), dtype=torch.float32) / size - 1
    image = (flow * (2 / size)[:, None, None, None])[None]
    for _ in range(steps):
        step = F.grid_sample(image, points.flip(-1)[None, None, None], align_corners=False)
        points = torch.clamp(points + step[0, :, 0, 0].T, -1.0, 1.0)
    ends = tuple(((points + 1) * 0.5 * size).int().T.numpy() + 20)
    counts = np.zeros([n + 40 for n in inside.shape], np.int64)
    np.add.at(counts, ends, 1)
    highest = F.max_pool3d(torch.from_numpy(counts)[None].float(), 5, 1, 2)[0].numpy()
    seeds = np.argwhere((counts == highest) & (counts > 10))
    masks = np.zeros(counts.shape, np.int64)
    for number, seed in enumerate(seeds[np.argsort(counts[tuple(seeds.T)], kind="stable")], 1):
        patch = tuple(slice(s - 5, s + 6) for s in seed)
        grown = torch.zeros((1, 11, 11, 11))
        grown[0, 5, 5, 5] = 1
        for _ in range(5):
            grown = F.max_pool3d(grown, 3, 1, 1) * torch.from_numpy(counts[patch] > 2)
        masks[patch][grown[0].numpy() > 0] = number
    labels = np.zeros(inside.shape, np.int64)
    labels[inds] = masks[ends]
    return labels
