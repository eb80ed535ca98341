"""`torchrun ... -m shardwise.run train.py ARGS`: `shardwise run`, for launchers that take a module."""

import sys

from shardwise.cli import app

if __name__ == "__main__":
    app(["run", *sys.argv[1:]], prog_name="shardwise")
