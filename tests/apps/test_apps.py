"""The table of apps: each names a function that workers have."""

from __future__ import annotations

from importlib import import_module

import pytest

from volpipe.apps.app import APPS


@pytest.mark.parametrize("name", APPS)
def test_an_app_names_a_function_that_is_there(name: str) -> None:
    module, _, function = APPS[name].function.partition(":")
    assert callable(getattr(import_module(module), function))
