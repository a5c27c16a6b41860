"""From affinities to objects: fragments, their graph, labels, their levels. The net before them is an ordinary run."""
