"""The `kvstore` command line, and `kvstored`, which is `kvstore serve`.

Exit codes: 0, all well; 1, `verify` found something wrong; 2, the command could not be carried out.
"""

from kvstore.cli.app import main, serve_main

__all__ = ["main", "serve_main"]
