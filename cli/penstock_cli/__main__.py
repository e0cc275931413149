"""`python -m penstock_cli` is the `penstock` command of this very interpreter."""

from penstock_cli.main import main

main()
