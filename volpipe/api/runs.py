"""Runs: a plan, what it takes, and the run itself, of one net or of a recipe of several stages.

Not here: the work (workflow, runs), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from volpipe.api.arguments import Named, load, site_of
from volpipe.blockwise.loop import TOLERATED_SHARE, Progress
from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import RecipeError
from volpipe.estimation.calibrate import OnTry, unheard
from volpipe.estimation.forecast import Forecast
from volpipe.estimation.limits import check_access, check_window
from volpipe.geometry.grid import Box
from volpipe.inference.output import check_name, with_format
from volpipe.inference.plan import Plan
from volpipe.inference.roi import find_part
from volpipe.nets.facts import check_present
from volpipe.nets.files import label_of
from volpipe.recipes.inference import Recipe
from volpipe.recipes.workflow import VOLUME, Comparison, Flow, find_flow, named
from volpipe.resolve import default_recipe
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.formats.container import locate
from volpipe.volumes.reader import Volume
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import absolute, open_volume
from volpipe.workflow.cost import FlowCost, forecast_flow, preview_flow
from volpipe.workflow.driver import SILENT, Listener, Report, execute, prepare, prepare_for, preview
from volpipe.workflow.execute import QUIET, FlowListener, FlowOptions, FlowReport, execute_flow
from volpipe.workflow.plan import FlowPlan, plan_flow
