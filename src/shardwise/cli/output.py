"""Exit statuses of commands, and errors as they print them."""

from __future__ import annotations

from rich.console import Console

OK, FOUND, NOT_RUN = 0, 1, 2


def print_failure(error: Exception, trace: str) -> None:
    """Print an error to stderr, after its traceback if there is one."""
    console = Console(stderr=True)
    if trace:
        console.print(trace.rstrip(), markup=False, highlight=False, soft_wrap=True)
    console.print(f"Error: {error}", markup=False, highlight=False, soft_wrap=True, style="red")
