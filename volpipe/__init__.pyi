from .api.labels import EvaluationResult, evaluate, segment
from .api.runs import estimate, plan, run
from .api.training import sweep, train, tune
from .api.volumes import open
from .errors import VolpipeError
from .geometry.grid import Box
from .inference.plan import Plan
from .recipes.inference import Recipe
from .recipes.segmentation import SegmentRecipe
from .recipes.training import TrainRecipe
from .segmentation.driver import SegmentationResult
from .training.data.dataset import ChunkSampler, WindowDataset
from .training.driver import TrainingResult
from .training.search.trials import TrialResult
from .volumes.reader import Volume
from .workflow.driver import Report

__version__: str

__all__ = [
    "Box",
    "ChunkSampler",
    "EvaluationResult",
    "Plan",
    "Recipe",
    "Report",
    "SegmentRecipe",
    "SegmentationResult",
    "TrainRecipe",
    "TrainingResult",
    "TrialResult",
    "VolpipeError",
    "Volume",
    "WindowDataset",
    "estimate",
    "evaluate",
    "open",
    "plan",
    "run",
    "segment",
    "sweep",
    "train",
    "tune",
]
