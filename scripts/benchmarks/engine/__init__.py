"""Rows of the engine itself, without workers or with workers that sleep."""
