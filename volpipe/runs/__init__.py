"""One run of a net: what waits for what, its folder, its provenance, and the proof that it is what was written."""
