"""`python -m embedserve.cli.run`: the command without its console script."""

from embedserve.cli.app import main

main()
