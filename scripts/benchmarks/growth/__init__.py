"""Rows of what grows with a volume."""
