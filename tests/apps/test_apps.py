"""The tables of apps: each name is one app's."""

from __future__ import annotations

from volpipe.apps import evaluation, inference, pool, segmentation, training


def test_no_two_apps_share_a_name() -> None:
    tables = (inference.APPS, training.APPS, segmentation.APPS, evaluation.APPS)
    assert sum(map(len, tables)) == len(pool.APPS)  # in whose union the later of two would take the other's tasks
