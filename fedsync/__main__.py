"""Entry point of ``python -m fedsync``, which is the command ``fedsync``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the folder in which it is started: others may write there

from fedsync.cli import main

main()
