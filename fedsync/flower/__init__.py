import logging

from fedsync.common.foreign import SHOWN

# Flower's own loggers write what peers say, too.
for library in ("flwr", "uvicorn.error"):
    logging.getLogger(library).addFilter(SHOWN)
