"""`python -m penstock.cli` is the `penstock` command of this very interpreter."""

from penstock.cli.main import main

main()
