"""`python -m shardwise`: the command line."""

from shardwise.cli import app

app(prog_name="python -m shardwise")
