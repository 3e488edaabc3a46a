"""The house grows no larger: raise a number only in a commit that names the capability or the promise it pays for."""

from pathlib import Path

import pytest

from bench.cost.house import ROOT, Size, house, measure

MOST = {
    "fedsync": Size(lines=53955, code=31648, docstrings=7703, largest_folder=18, names_twice=0),
    "fedsync/extras": Size(lines=14010, code=8027, docstrings=2087, largest_folder=11, names_twice=0),
    "tests": Size(lines=73678, code=48873, docstrings=3143, largest_folder=40, names_twice=32),
}
"""Largest sizes; lower them when the house gets smaller. `make house` prints what it has."""


@pytest.mark.slow
def test_the_house_gets_no_larger() -> None:
    sizes = house()
    for part, most in MOST.items():
        found = sizes[part]
        assert found.lines <= most.lines and found.code <= most.code and found.docstrings <= most.docstrings, part
        assert found.largest_folder <= most.largest_folder and found.names_twice <= most.names_twice, part


def test_lines_are_counted_by_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    text = (
        '"""Says what it is.\n\nTwice.\n"""\n\nimport os\nfrom x import (\n    y,\n)\n\n# w\nA = [\n    1,  # 1\n]\n'
        '\n\ndef f():\n    "Docs."\n    return """\n    kept"""\n'
    )
    for name in ("a/same.py", "same.py", "__init__.py", "a/__init__.py"):
        (tmp_path / name).write_text(text if name == "same.py" else "")
    found = measure(sorted(tmp_path.rglob("*.py")))
    assert found == Size(lines=20, code=6, docstrings=5, largest_folder=2, names_twice=1)
    assert (ROOT / "fedsync").is_dir()
