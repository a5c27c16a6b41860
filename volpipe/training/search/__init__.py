"""Many trainings of one recipe with other values: grids of them, and Optuna's. One training is in training."""
