"""`python -m volpipe` and `volpipe` are the command line."""

import gc
import logging
import os
import threading
import time

from volpipe.process import prepare_process

BEGAN = time.time()  # before the imports, which are a part of what a command takes
gc.set_threshold(
    50_000
)  # objects, not 700: what imports make stays, and to look for garbage in it takes 0.15 s of a start


def main() -> None:
    """Run the command line; who asked to stop does not wait for threads that compute."""
    prepare_process()  # before any file is opened
    from volpipe.blockwise.interrupts import INTERRUPTED
    from volpipe.cli import app

    # On a full disk each line of each log, Parsl's too, would be told as an error with a traceback.
    logging.raiseExceptions = False
    try:
        app.main(BEGAN)
    except SystemExit as end:
        if end.code == INTERRUPTED and any(
            not t.daemon for t in threading.enumerate() if t is not threading.main_thread()
        ):
            os._exit(INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
