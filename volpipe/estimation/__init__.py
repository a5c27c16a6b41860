"""What a plan takes before it runs: bytes, files, memory, hours; and the blocks that are tried to know it."""
