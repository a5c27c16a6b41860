"""A stage of a flow: what every kind of work says of itself, and in which words; the kinds are in packages above."""
