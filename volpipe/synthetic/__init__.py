"""Synthetic tissue, for the demo and for tests: the same voxels from any box. No real volume is read."""
