"""Volumes in a bucket: a server on loopback, and a line to it."""
