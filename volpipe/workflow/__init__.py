"""One run from volume to report, and several stages one after the other. What a stage computes is elsewhere."""
