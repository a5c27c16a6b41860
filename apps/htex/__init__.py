"""Parsl's executor for many workers, made to hold: how it starts, is watched and ends."""
