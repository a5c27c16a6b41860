"""What notebooks look at: a net tried on a box, two volumes side by side, seams, blends and the cost of windows."""
