from .api.batch import batch
from .api.explore import explore
from .api.labels import evaluate, segment
from .api.nets import load_net, net_report
from .api.outputs import reproduce, status, verify
from .api.runs import estimate, plan, run
from .api.sites import check_site, list_sites
from .api.training import sweep, train, tune
from .api.viewer import view
from .api.volumes import convert, draw_comparison, info, list_arrays, open, sample
from .errors import BatchError, VolpipeError
from .evaluation.driver import EvaluationResult
from .geometry.grid import Box
from .inference.plan import Plan
from .notebook.explore import Explorer
from .recipes.inference import Recipe
from .recipes.segmentation import SegmentRecipe
from .recipes.training import TrainRecipe
from .segmentation.driver import SegmentationResult
from .training.data.dataset import ChunkSampler, WindowDataset
from .training.driver import TrainingResult
from .training.search.trials import TrialResult
from .viewer.viewer import Viewer
from .volumes.reader import Volume
from .workflow.batch_table import BatchReport
from .workflow.driver import Report

__version__: str

__all__ = [
    "BatchError",
    "BatchReport",
    "Box",
    "ChunkSampler",
    "EvaluationResult",
    "Explorer",
    "Plan",
    "Recipe",
    "Report",
    "SegmentRecipe",
    "SegmentationResult",
    "TrainRecipe",
    "TrainingResult",
    "TrialResult",
    "Viewer",
    "VolpipeError",
    "Volume",
    "WindowDataset",
    "batch",
    "check_site",
    "convert",
    "draw_comparison",
    "estimate",
    "evaluate",
    "explore",
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
    "segment",
    "status",
    "sweep",
    "train",
    "tune",
    "verify",
    "view",
]
