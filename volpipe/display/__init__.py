"""What people see of work, on a terminal or below a notebook's cell: tables, lines and bars, and where they go."""
