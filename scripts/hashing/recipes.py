"""Recipes of trainings and of several stages, which steps take from files."""

from __future__ import annotations

SUPERRES = """
[net]
name = "superres"
options = { factor = 2, features = 4, num_blocks = 1 }

[[data]]
path = "small.n5/raw"
held_out = "0:12,:,:"

[degrade]
kind = "bin"

[samples]
shape = [4, 16, 16]
margin = [1, 2, 2]

[train]
steps = 8
threads = 1
warm_up = 2
checkpoint_every = 4
validate_every = 4
predict_every = 8

[sweep]
"train.learning_rate" = [1e-3, 2e-3]
"""
AFFINITIES = """
[net]
name = "unet3d"
options = { features = [4, 8], out_channels = 3, output = "sigmoid" }

[[data]]
path = "small.n5/raw"
labels = "small.n5/labels"
held_out = "0:12,:,:"

[affinities]
offsets = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]

[samples]
shape = [8, 32, 32]

[degrade]
kind = "none"

[train]
steps = 4
threads = 1
validate_every = 4
"""
FLOW = """
[[stage]]
name = "restore"
recipe = "default"
windows = { shape = [24, 48, 48], block = [1, 1, 1] }

[[stage]]
name = "affinities"
recipe = "affinities"
windows = { shape = [32, 48, 48], block = [1, 1, 1], blend = "hann" }

[[stage]]
name = "labels"
kind = "label"

[[stage]]
name = "scores"
kind = "evaluate"
labels = true
reference = "small.n5/labels"
"""
