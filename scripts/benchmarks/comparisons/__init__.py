"""Rows with another side: a bare loop, a floor, MONAI, dask. Its process is the peer."""
