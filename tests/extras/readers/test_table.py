from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.table import TableSource
from tests.extras.readers.damage import survives

COLUMNS = {"x": [1.5, -2.0, 3.0], "name": ["a", "b", "c"], "y": [4, 5, 6], "t": [0, 1, 1]}


def write(folder: Path, kind: str, columns: dict[str, list[object]] | None = None) -> str:
    columns = columns or dict(COLUMNS)
    file = folder / f"a.{kind}"
    if kind == "csv":
        rows = zip(*columns.values(), strict=True)
        lines = [",".join(columns), *(",".join("" if cell is None else str(cell) for cell in row) for row in rows)]
        file.write_text("\n".join(lines), encoding="utf-8")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), file)
    return str(file)


both = pytest.mark.parametrize("kind", ["csv", "parquet"])


@both
def test_columns_become_inputs_and_a_target(tmp_path: Path, kind: str) -> None:
    source = TableSource(write(tmp_path, kind), target="t", ignore=("name",))
    train, test = source.read()
    assert (source.shape().inputs, source.shape().classes, test) == ((2,), 2, None)
    np.testing.assert_array_equal(train.inputs, np.array([[1.5, 4], [-2, 5], [3, 6]], dtype=np.float32))
    assert train.targets.dtype == np.int64
    np.testing.assert_array_equal(train.targets, [0, 1, 1])


@both
def test_the_target_may_be_a_number_or_missing(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path, kind)
    numbers, _ = TableSource(file, target="x", classes=0, ignore=("name",)).read()
    none, _ = TableSource(file, ignore=("name",)).read()
    np.testing.assert_array_equal(numbers.targets, np.array([1.5, -2, 3], dtype=np.float32))
    assert none.inputs.shape == (3, 3)
    assert not none.targets.any()


@both
@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ({"target": "tt"}, None, r"task\.data\.target: .*no column 'tt'\. Write one of the 4 names"),
        (
            {"target": "t", "ignore": ("nme",)},
            None,
            r"task\.data\.ignore: .*no column 'nme'\. Write one of the 4 names",
        ),
        ({"target": "t"}, {"t": [1]}, r"task\.data\.ignore: .*no column left"),
        ({"target": "t"}, None, r"column 2: (the cell is not a number|the column is not one of numbers)"),
        ({"target": "t"}, {"x": [1.0, None], "t": [0, 1]}, r"sample 2: a value is missing|line 3, column 1"),
        ({"target": "t"}, {"x": [1.0, 2.0], "t": [0, 2]}, r"sample 2: the label is not one of the classes 0 to 1"),
        ({"target": "t"}, {"x": [1.0, 2.0], "t": [0.5, 1]}, r"sample 1: the label is not one"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, kind: str, options: dict[str, object], columns: dict[str, list[object]] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TableSource(write(tmp_path, kind, columns), **options).read()  # type: ignore[arg-type]  # from a table


@both
def test_missing_and_damaged_files_are_complained_of(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"no\.{kind}"):
        TableSource(str(tmp_path / f"no.{kind}")).read()
    file = write(tmp_path, kind)
    assert survives(Path(file), TableSource(file, target="t", ignore=("name",)).read) > 15
