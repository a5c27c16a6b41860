"""The command line: the only code that prints. Everything that it does can be done from Python."""
