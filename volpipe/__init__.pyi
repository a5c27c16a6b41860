from .api.runs import estimate, plan, run
from .api.volumes import open
from .errors import VolpipeError
from .geometry.grid import Box
from .inference.plan import Plan
from .recipes.inference import Recipe
from .recipes.segmentation import SegmentRecipe
from .recipes.training import TrainRecipe
from .training.data.dataset import ChunkSampler, WindowDataset
from .volumes.reader import Volume
from .workflow.driver import Report

__version__: str

__all__ = [
    "Box",
    "ChunkSampler",
    "Plan",
    "Recipe",
    "Report",
    "SegmentRecipe",
    "TrainRecipe",
    "VolpipeError",
    "Volume",
    "WindowDataset",
    "estimate",
    "open",
    "plan",
    "run",
]
