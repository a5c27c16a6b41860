"""`python -m volpipe` and `volpipe` are the command line."""

import time

BEGAN = time.time()  # before the imports, which are a part of what a command takes


def main() -> None:
    """Run the command line."""
    from volpipe.cli import app

    app.main(BEGAN)


if __name__ == "__main__":
    main()
