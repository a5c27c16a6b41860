from .api.nets import load_net, net_report
from .api.outputs import reproduce, status, verify
from .api.runs import estimate, plan, run
from .api.sites import check_site, list_sites
from .api.volumes import convert, draw_comparison, info, list_arrays, open, sample
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
    "check_site",
    "convert",
    "draw_comparison",
    "estimate",
    "info",
    "list_arrays",
    "list_sites",
    "load_net",
    "net_report",
    "open",
    "plan",
    "reproduce",
    "run",
    "sample",
    "status",
    "verify",
]
