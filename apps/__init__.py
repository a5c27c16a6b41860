"""The Parsl apps: functions of volpipe as workers run them; and names for files of sites, loaded when they are used.

Not here: sites (configs). What a site's file may import is listed in `__init__.pyi`, where editors see it as well.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
