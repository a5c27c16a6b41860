"""Many blocks on workers: stages, tasks, the loop, the journal. No net, no voxel, no Parsl."""
