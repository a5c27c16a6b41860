"""The Parsl apps, thin wrappers around plain functions of `volpipe.worker`, and the place where Parsl starts."""
