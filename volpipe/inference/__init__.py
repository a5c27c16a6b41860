"""The life of a voxel, a step a file: plan, windows, net, weighted sums, output, levels. Their order is in runs."""
