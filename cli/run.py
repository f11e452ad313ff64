"""`python -m embedserve.cli.run`: the command without its console script."""

from embedserve.cli.app import main

if __name__ == "__main__":  # a benchmark's worker processes import this module too
    main()
