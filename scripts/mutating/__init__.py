"""Mutants: copies of the package with one change of logic, and the tests that should notice."""
