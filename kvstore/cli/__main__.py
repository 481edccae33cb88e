"""`python -m kvstore.cli`."""

from kvstore.cli.app import main

main()
