"""`python -m kvstore`."""

from kvstore.cli.app import main

main()
