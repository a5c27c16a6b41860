"""Watching work from outside, by machines: metrics for Prometheus, a log as JSON lines, a notification at the end."""
