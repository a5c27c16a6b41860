"""What scripts/hashes does: commands are given, and what they write is hashed."""
