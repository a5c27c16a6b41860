#!/usr/bin/env -S python3 -IS
"""Stands for Parsl's script of this name: one that is forked (tests/support/warm.py), or else that script itself."""

import json
import os
import signal
import socket
import sys

FORWARDED = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def main() -> None:
    """Ask for a fork of the script, give it the signals that arrive here, and end as it does."""
    here, name = os.path.split(sys.argv[0])
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != here]
    script = next(path for folder in folders if os.access(path := os.path.join(folder, name), os.X_OK))  # noqa: PTH118
    if "VOLPIPE_WARM" in os.environ:
        answers = socket.socket(socket.AF_UNIX)
        answers.connect(os.environ["VOLPIPE_WARM"])
        text = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), script]).encode()  # noqa: PTH109
        socket.send_fds(answers, [len(text).to_bytes(8, "big")], [0, 1, 2])
        answers.sendall(text)
        lines = answers.makefile("r")
        if lines.readline() != "anew\n":
            for number in FORWARDED:
                signal.signal(number, lambda number, _: answers.send(bytes([number])))
            end(int(lines.readline()))
    os.execv(script, [script, *sys.argv[1:]])


def end(status: int) -> None:
    """End as a process of that status did."""
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


main()
