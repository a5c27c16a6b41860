"""`python -m volpipe` is the command line."""

from volpipe.cli import main

if __name__ == "__main__":
    main()
