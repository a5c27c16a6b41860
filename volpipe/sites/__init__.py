"""Sites by name, and the facts of a worker there. The sites themselves are in configs/."""
