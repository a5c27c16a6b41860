"""What scripts/bench measures: one file for each family of rows, and what they share."""
