"""References to arrays, and how they are opened, read, written, copied and surveyed. No net, no plan."""
