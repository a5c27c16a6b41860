"""A chunk whose name is there but cannot be opened is a fault in each format, whoever reads; a missing one is fill."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorstore
import tifffile
import zarr
from chunk_layouts import DATA, HASHLESS, LAYOUTS, chunk_files, root, write

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.inference.infer import infer_volume if False else None
