from .api.batch import batch
from .api.compare import compare
from .api.explore import explore
from .api.labels import evaluate, segment
from .api.nets import load_net, net_report
from .api.notebook import blends, seams, side_by_side, try_net, windows
from .api.outputs import report, reproduce, status, verify
from .api.runs import estimate, plan, run
from .api.training import sweep, train, tune
from .api.volumes import convert, info, list_arrays, open, sample
from .apps.site_check import check_site
from .errors import BatchError, VolpipeError
from .evaluation.pictures import draw_comparison
from .evaluation.results import ComparisonResult, EvaluationResult
from .geometry.grid import Box
from .inference.plan import Plan
from .notebook.explore import Explorer
from .recipes.inference import Recipe
from .recipes.segmentation import SegmentRecipe
from .recipes.training import TrainRecipe
from .segmentation.driver import SegmentationResult
from .sites.find import list_sites
from .training.data.dataset import ChunkSampler, WindowDataset
from .training.driver import TrainingResult
from .training.search.trials import TrialResult
from .viewer.viewer import Viewer, view
from .volumes.volume import View, Volume
from .workflow.batch_table import BatchReport
from .workflow.compare import ComparisonTable
from .workflow.driver import Report

__version__: str

__all__ = [
    "BatchError",
    "BatchReport",
    "Box",
    "ChunkSampler",
    "ComparisonResult",
    "ComparisonTable",
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
    "View",
    "Viewer",
    "VolpipeError",
    "Volume",
    "WindowDataset",
    "batch",
    "blends",
    "check_site",
    "compare",
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
    "report",
    "reproduce",
    "run",
    "sample",
    "seams",
    "segment",
    "side_by_side",
    "status",
    "sweep",
    "train",
    "try_net",
    "tune",
    "verify",
    "view",
    "windows",
]
