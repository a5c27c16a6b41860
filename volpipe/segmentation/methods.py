"""The ways to cut blocks into fragments. Not here: what such a way is (method)."""

from volpipe.segmentation.centres import CENTRES
from volpipe.segmentation.flows import FLOWS
from volpipe.segmentation.fragments import COMPONENTS, WATERSHED
from volpipe.segmentation.method import FragmentMethod

METHODS = (COMPONENTS, WATERSHED, CENTRES, FLOWS)


def method_named(name: str) -> FragmentMethod:
    """Return the way of that name, as `objects.method` has it."""
    return next(method for method in METHODS if method.name == name)
