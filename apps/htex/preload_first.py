"""The first of what a process imports that workers are forks of: it puts garbage collection off until all is there."""

from __future__ import annotations

import gc

gc.disable()  # 0.4 of 2.6 s of its processor time (2026-11-25); preload enables it again
