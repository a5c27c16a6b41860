"""A training: its steps, losses, ranks and checkpoints. What it learns from is in data, many of them are in search."""
