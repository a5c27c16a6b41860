"""Integer arithmetic of boxes and grids, and weights that sum to one. Numpy alone: nothing is read or written."""
