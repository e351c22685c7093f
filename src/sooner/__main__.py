"""`python -m sooner`: the command line. Knows nothing else."""

from sooner.cli.main import run

run()
