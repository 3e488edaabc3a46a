"""A published Flower app, as it is and with what its author changed for FedSync."""

import shutil
from pathlib import Path

STOCK = Path(__file__).parent / "stock"

CHANGES = [
    (
        "from flwr.clientapp import ClientApp\n",
        "from flwr.clientapp import ClientApp\nfrom fedsync.client import steps\n",
    ),
    ("train_fn(model, trainloader,", "train_fn(model, steps(msg, trainloader),"),
]
"""Of ``client_app.py``, a line each; the rest of the app stays."""


def stock_app(folder: Path, changes: list[tuple[str, str]]) -> Path:
    """A copy of the app in ``folder``, with these lines changed."""
    shutil.copytree(STOCK, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "digitsapp" / "client_app.py"
    text = file.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text, encoding="utf-8")
    return folder
