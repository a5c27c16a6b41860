"""Fetches of chunks by workers that keep decoded chunks, which neighbouring blocks share.

Not here: reading them (windows).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from functools import lru_cache

Range = tuple[int, int]  # first and last chunk

MOST_TOUCHES = 200_000  # simulated; of a larger plan, those of blocks in its middle


@lru_cache(maxsize=16)  # the ways to the net, in the table of alternatives, read the same chunks
def fetched_share(along: tuple[tuple[Range, ...], ...], capacity: int, num_workers: int, bundle: int) -> float:
    """Return fetches per touch of a chunk, 0 to 1, when workers take bundles of blocks in turn, in ascending order.

    Args:
        along: per axis (z, y, x), the chunks that the blocks there touch.
        capacity: chunks that each worker keeps, the latest ones.
        num_workers: workers that read.
        bundle: blocks of a task.
    """
    counts = [len(ranges) for ranges in along]
    most = max(low_high[1] - low_high[0] + 1 for low_high in itertools.chain(*along)) ** 3
    num_blocks = counts[0] * counts[1] * counts[2]
    num_simulated = min(num_blocks, max(num_workers * bundle, MOST_TOUCHES // most))
    first = (num_blocks - num_simulated) // 2
    caches: list[OrderedDict[tuple[int, ...], None]] = [OrderedDict() for _ in range(num_workers)]
    touches = fetches = 0
    for number in range(first, first + num_simulated):
        cache = caches[number // bundle % num_workers]
        yx, x = divmod(number, counts[2])
        z, y = divmod(yx, counts[1])
        spans = [range(low, high + 1) for low, high in (along[0][z], along[1][y], along[2][x])]
        for chunk in itertools.product(*spans):
            touches += 1
            fetches += chunk not in cache
            cache[chunk] = None
            cache.move_to_end(chunk)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return fetches / touches
