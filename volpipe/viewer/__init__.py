"""Volumes in a browser: Neuroglancer's own client, served on this machine with what it may read."""
