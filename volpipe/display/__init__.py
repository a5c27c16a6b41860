"""What the command line prints: tables and lines, and where they go. When it is printed is up to the commands."""
