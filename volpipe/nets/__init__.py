"""Nets by name, and facts about them: scale, stride, halo, memory. The shipped nets themselves are in models/."""
