"""volpipe runs a neural net over a 3D volume far larger than memory, in chunks, on whatever machines there are."""

from pathlib import Path

# apps/, models/ and configs/ lie beside this folder in a checkout and inside it once installed.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))

__version__ = "0.1.0"

__all__ = ["__version__"]
