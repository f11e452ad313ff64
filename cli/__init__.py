"""The `embedserve` command."""

from embedserve.cli.app import main

__all__ = ["main"]
