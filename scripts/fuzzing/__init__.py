"""What `scripts/fuzz` does: valid small volumes, mutations of them, and how each is tried in a process of its own."""
