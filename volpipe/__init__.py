"""volpipe runs a neural net over a 3D volume far larger than memory, in chunks, on whatever machines there are.

`import volpipe as vp` gives the names of `__init__.pyi`, each loaded when it is first used.
"""

from volpipe.process import leave_current_folder

leave_current_folder()  # before anything is looked for

from pathlib import Path  # noqa: E402

from lazy_loader import attach_stub  # noqa: E402

# apps/, models/ and configs/ lie beside this folder in a checkout and inside it once installed.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
