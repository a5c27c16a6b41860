"""Sites by name, and what a worker finds out about itself there. The sites themselves are in configs/."""
