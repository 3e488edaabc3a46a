"""``python -m fedsync`` is ``fedsync``."""

from fedsync.cli import main

main()
