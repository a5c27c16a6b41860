"""Bytes, below any format: files, buckets, locks, quotas, chunks through tensorstore. No axes, no voxel sizes."""
