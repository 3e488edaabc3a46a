"""Tables as hospitals export them: what a cell is taken for, and what is refused rather than guessed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from fedsync.common.errors import ConfigError
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.tasks.task_section import AnyTask, TaskSection

TASK: TypeAdapter[TaskSection] = TypeAdapter(AnyTask)


def read(folder: Path, text: str | bytes, columns: dict[str, Any] | None = None, **options: Any) -> SiloData:
    """The rows of a silo that is the only one, by a task as a strategy file says it."""
    file = folder / "a.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    made = {"kind": "csv", "files": [str(file)], "target": "t", "test_share": 0.5, **options}
    if columns is not None:
        made["columns"] = columns
    return TASK.validate_python(made).build().data(SiloSlot("a", 0, 1, seed=7))


def rows(data: SiloData) -> np.ndarray[Any, Any]:
    """All features, sorted, so that splits do not matter."""
    features = torch.cat([data.train.tensors[0], data.test.tensors[0]]).numpy()  # type: ignore[attr-defined]
    return features[np.lexsort(features.T)]


def column(*cells: str, separator: str = ",") -> str:
    """A table with these cells in the column ``x`` and a target."""
    return "".join(f"{line}\n" for line in [f"x{separator}t", *(f"{c}{separator}{i % 2}" for i, c in enumerate(cells))])


PLAIN = ("1", "2", "3", "4", "5", "6")


@pytest.mark.parametrize(
    "gap", ["", " ", "?", "-", ".", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", "--"]
)
def test_the_usual_markers_are_gaps_and_no_words(gap: str, tmp_path: Path) -> None:
    features = rows(read(tmp_path, column(*PLAIN, gap, gap), standardise={"x": [3.5, 2.0]}))
    assert features.shape == (8, 1), "one feature of a number, not eight of a text"
    expected = sorted([(float(cell) - 3.5) / 2 for cell in PLAIN] + [0.0, 0.0])
    np.testing.assert_allclose(features[:, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "cell",
    [
        '"1,234"', '"1,5"', "45%", "2024-01-31", "31.01.2024", "1_0", "12 mg", "<5", "0x1F", "inf", "1e999", "٣",
        "5 Jan", "Jan 5 2024", "-3.4e38", "-1.8e308", "#DIV/0!", "12:30", "€5", "1 234", "#VALUE!",
    ],
)  # fmt: skip
@pytest.mark.parametrize("others", ["numbers", "alike"])
def test_what_looks_like_a_number_is_neither_hashed_nor_guessed(cell: str, others: str, tmp_path: Path) -> None:
    cells = (*PLAIN[:3], cell, *PLAIN[3:]) if others == "numbers" else (cell,) * 6
    with pytest.raises(ConfigError, match=r"a\.csv, line \d+, column 1.*task\.columns") as caught:
        read(tmp_path, column(*cells))
    line = 5 if others == "numbers" else 2
    assert f"line {line}," in caught.value.place
    assert cell.strip('"') not in caught.value.problem


@pytest.mark.parametrize(
    ("rule", "cells", "expected"),
    [
        ({"thousands": ","}, ['"1,234"', "5", '"12,345.5"', "6"], [5, 6, 1234, 12345.5]),
        ({"decimal": ","}, ['"1,5"', "2", '"-0,25"', '"3,0"'], [-0.25, 1.5, 2, 3]),
        ({"decimal": ",", "thousands": "."}, ['"1.234,5"', "2", "3", "4"], [2, 3, 4, 1234.5]),
        ({"unit": "%"}, ["45%", "50 %", "55", "60%"], [45, 50, 55, 60]),
        ({"unit": "mg/dl"}, ["45 mg/dl", "50", "55", "60"], [45, 50, 55, 60]),
        ({"gaps": [-9]}, ["-9", "1", "2", "-9.0"], [0, 0, 1, 2]),
        ({"gaps": [-3.4e38, "unknown"]}, ["-3.4e+38", "1", "2", "unknown"], [0, 0, 1, 2]),
        ({"kind": "number"}, ["1", "2", "3", ""], [0, 1, 2, 3]),
    ],
)
def test_columns_say_how_numbers_are_written(
    rule: dict[str, Any], cells: list[str], expected: list[float], tmp_path: Path
) -> None:
    found = rows(read(tmp_path, column(*cells), {"x": rule}, standardise={"x": [0.0, 1.0]}))
    np.testing.assert_allclose(found[:, 0], expected)


@pytest.mark.parametrize(
    ("rule", "cell"),
    [
        ({"thousands": ","}, '"1,5"'),  # no group of three
        ({"decimal": ","}, "1.5"),
        ({"unit": "%"}, "5 mg"),
        ({"gaps": [-9]}, "NA"),  # the usual markers are no gaps where others are named
        ({"kind": "number"}, "many"),
        ({"categories": ["low", "high"]}, "middle"),
    ],
)
def test_a_cell_that_is_not_as_declared_is_named(rule: dict[str, Any], cell: str, tmp_path: Path) -> None:
    fine = ("low",) * 3 if "categories" in rule else ("1", "2", "3")
    with pytest.raises(ConfigError, match=r"a\.csv, line 5, column 1 \('x'\)"):
        read(tmp_path, column(*fine, cell, *fine), {"x": rule})


@pytest.mark.parametrize("names", [["low", "high"], ["None", "mild"]], ids=["usual", "called like a gap"])
def test_categories_have_a_feature_each_in_the_order_declared(names: list[str], tmp_path: Path) -> None:
    found = rows(read(tmp_path, column(names[0], names[1], "?", names[1]), {"x": {"categories": names}}))
    np.testing.assert_array_equal(found, [[0, 0], [1, 0], [0, 1], [0, 1]])


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_delimiters_are_seen_in_the_header(separator: str, tmp_path: Path) -> None:
    assert rows(read(tmp_path, column(*PLAIN, separator=separator))).shape == (6, 1)


def test_a_decimal_comma_in_a_table_of_semicolons_is_declared_or_named(tmp_path: Path) -> None:
    text = column("1,5", "2,5", "3,5", "4,5", separator=";")
    with pytest.raises(ConfigError, match=r"line 2, column 1: .*decimal"):
        read(tmp_path, text)
    assert rows(read(tmp_path, text, {"x": {"decimal": ","}})).shape == (4, 1)


def test_an_index_column_of_pandas_is_no_feature(tmp_path: Path) -> None:
    body = "".join(f"{i},{c},{i % 2}\n" for i, c in enumerate(PLAIN))
    assert rows(read(tmp_path, ",x,t\n" + body)).shape == (6, 1)
    assert rows(read(tmp_path, "Unnamed: 0,x,t\n" + body)).shape == (6, 1)
    with pytest.raises(ConfigError, match=r"line 1: column 2 has no name"):
        read(tmp_path, "x,,t\n" + body)


def test_text_targets_are_named_with_the_remedy_and_learnt_when_declared(tmp_path: Path) -> None:
    text = "x,t\n" + "".join(f"{i},{'yes' if i % 3 else 'no'}\n" for i in range(12))
    with pytest.raises(ConfigError, match=r"line 2, column 2 \('t'\): .*text.*columns: \{t: \{categories: "):
        read(tmp_path, text)
    data = read(tmp_path, text, {"t": {"categories": ["no", "yes"]}})
    labels = torch.cat([data.train.tensors[1], data.test.tensors[1]])  # type: ignore[attr-defined]
    assert torch.bincount(labels).tolist() == [4, 8]


def test_yes_and_no_without_quotes_are_explained() -> None:
    """YAML reads them as true and false."""
    with pytest.raises(Exception, match="quotes"):
        TASK.validate_python(
            {"kind": "csv", "files": ["a"], "target": "t", "columns": {"t": {"categories": [False, True]}}}
        )


def test_a_long_cell_is_a_cell(tmp_path: Path) -> None:
    assert rows(read(tmp_path, column("a" * 200_000, "b", "a", "b"))).shape == (4, 8)


def test_lines_are_those_of_the_file_though_cells_have_several(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 7, column 2"):
        read(tmp_path, 'x,y,t\n"one\ntwo",1,0\n\nb,2,1\n\nc,5%,0\nd,3,1\n')


def test_the_order_of_columns_in_a_file_does_not_matter(tmp_path: Path) -> None:
    body = [(i, 10 * i, i % 2) for i in range(8)]
    one = rows(read(tmp_path, "a,b,t\n" + "".join(f"{a},{b},{t}\n" for a, b, t in body)))
    two = rows(read(tmp_path, "t,b,a\n" + "".join(f"{t},{b},{a}\n" for a, b, t in body)))
    np.testing.assert_array_equal(one, two)


def test_no_feature_is_infinite(tmp_path: Path) -> None:
    """A test row far from training rows that hardly differ would be beyond float32, and evaluations NaN."""
    cells = ["3e12", "1e-200", "0", "1e-200", "0", "3e12", "1e-200", "0", "1e-200", "0"]
    assert np.isfinite(rows(read(tmp_path, column(*cells)))).all()
    with pytest.raises(ConfigError, match="line 2, column 1"):
        read(tmp_path, column(*cells), standardise={"x": [0.0, 1e-300]})
