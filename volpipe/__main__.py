"""`python -m volpipe` and `volpipe` are the command line."""

import gc
import time

BEGAN = time.time()  # before the imports, which are a part of what a command takes
gc.set_threshold(
    50_000
)  # objects, not 700: what imports make stays, and to look for garbage in it takes 0.15 s of a start


def main() -> None:
    """Run the command line."""
    from volpipe.cli import app

    app.main(BEGAN)


if __name__ == "__main__":
    main()
