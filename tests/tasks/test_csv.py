import logging
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.evaluation.survey.findings import ColumnScale
from fedsync.model.table_columns import ColumnRule
from fedsync.tasks.csv_ import CsvTask
from fedsync.tasks.task_protocol import SiloData, SiloSlot

GOOD = "age,town,sick\n" + "".join(f"{20 + i},{'abc'[i % 3]},{i % 2}\n" for i in range(20))


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def load(task: CsvTask, index: int = 0, count: int = 1) -> SiloData:
    return task.data(SiloSlot(f"silo-{index}", index, count, seed=7))


def rows(data: SiloData) -> torch.Tensor:
    return torch.cat([data.train.tensors[0], data.test.tensors[0]])


def test_shapes_and_shares(tmp_path: Path) -> None:
    task = CsvTask((write(tmp_path, "a.csv", GOOD),), "sick", test_share=0.2)
    data = load(task)
    assert data.train.tensors[0].shape == (16, 1 + 8)  # a number, and a text of 8 buckets
    assert data.train.tensors[0].dtype == torch.float32
    assert torch.bincount(data.test.tensors[1]).tolist() == [2, 2]  # 20 % of 10 of each class
    assert task.model().weight.shape == (2, 9)


@pytest.mark.parametrize("options", [{}, {"validation": 0.5}, {"by_row": True}])
def test_a_silo_without_training_rows_is_told_so(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whatever reads its training rows; a survival analysis counts test rows, too."""
    task = CsvTask((write(tmp_path, "a.csv", GOOD),), "sick", test_share=0.999, **options)
    for read in (task.data, task.columns):
        with pytest.raises(ConfigError, match=r"silo 'a' holds no training rows in .*\. .* lower task\.test_share"):
            read(SiloSlot("a", 0, 1, 7))
    assert task.table(SiloSlot("a", 0, 1, 7))


def test_an_mlp_has_a_hidden_layer(tmp_path: Path) -> None:
    task = CsvTask((write(tmp_path, "a.csv", GOOD),), "sick", model="mlp", hidden=5)
    with pytest.raises(ConfigError, match=r"task\.files: .*no table was read here\. Ask a silo"):
        task.model()
    load(task)
    model = task.model()
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(5, 9), (5,), (2, 5), (2,)]


def test_numbers_by_hand(tmp_path: Path) -> None:
    # The one row of class 1 stays in training, one of the two rows of class 0 is the test split.
    file = write(tmp_path, "a.csv", "x,y,z,t\n1,5,?,0\n3,,NA,1\n3,5,nan,0\n")
    data = load(CsvTask((file,), "t", test_share=0.5))
    train, test = data.train.tensors[0].numpy(), data.test.tensors[0].numpy()
    x_train = np.array([1.0, 3.0]) if test[0, 0] > 0 else np.array([3.0, 3.0])
    x_test = 3.0 if test[0, 0] > 0 else 1.0
    deviation = x_train.std() or 1.0
    np.testing.assert_allclose(train[:, 0], (x_train - x_train.mean()) / deviation, rtol=1e-6)
    np.testing.assert_allclose(test[:, 0], (x_test - x_train.mean()) / deviation, rtol=1e-6)
    assert not train[:, 1:].any()  # y is 5 or imputed with 5, z has no value at all
    assert not test[:, 1:].any()


def test_no_test_row_leaks_into_the_features(tmp_path: Path) -> None:
    plain = load(CsvTask((write(tmp_path, "a.csv", GOOD),), "sick"))
    in_test = {int(row) for row in np.flatnonzero([_age_in(plain, age) for age in range(20, 40)])}
    lines = GOOD.splitlines()
    for row in in_test:
        lines[row + 1] = lines[row + 1].replace(str(20 + row), str(1000 + row))
    changed = load(CsvTask((write(tmp_path, "b.csv", "\n".join(lines)),), "sick"))
    assert len(in_test) == len(plain.test)
    assert torch.equal(changed.train.tensors[0], plain.train.tensors[0])
    assert not torch.equal(changed.test.tensors[0], plain.test.tensors[0])


def _age_in(data: SiloData, age: int) -> bool:
    """Whether the row with this age is in the test split: ages ascend, and so do standardised ones."""
    ages = torch.sort(rows(data)[:, 0]).values
    return bool((data.test.tensors[0][:, 0] == ages[age - 20]).any())


def test_texts_are_hashed_alike_everywhere(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", "town,t\n Paris ,0\nRome,0\n?,1\n,1\n")
    blocks = {tuple(row) for row in rows(load(CsvTask((file,), "t"))).tolist()}

    def one_hot(word: str) -> tuple[float, ...]:
        return tuple(float(bucket == zlib.crc32(word.encode()) % 8) for bucket in range(8))

    assert blocks == {one_hot("Paris"), one_hot("Rome"), (0.0,) * 8}


def test_targets_above_a_threshold_or_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path, "a.csv", "x,t\n" + "".join(f"{i},{i % 4}\n" for i in range(40)))

    def labels(**options: Any) -> list[int]:
        data = load(CsvTask((file,), "t", **options))
        return torch.bincount(torch.cat([data.train.tensors[1], data.test.tensors[1]])).tolist()

    assert labels(positive_above=0) == [10, 30]
    assert labels(classes=4) == [10, 10, 10, 10]


def test_a_silo_needs_only_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "theirs.csv").mkdir()  # nobody can read a table there
    task = CsvTask((str(tmp_path / "theirs.csv"), write(tmp_path, "mine.csv", GOOD)), "sick")
    assert rows(load(task, 1, 2)).shape == (20, 9)
    assert task.model().weight.shape == (2, 9)


def test_declared_texts_agree_though_cells_do_not(tmp_path: Path) -> None:
    numbers = "code,t\n1,0\n2,1\n"
    files = (write(tmp_path, "a.csv", numbers), write(tmp_path, "b.csv", "code,t\n1,0\nx,1\n"))
    wrong = (
        r"b\.csv, line 3, column 1: .*numbers, but this cell is a word.*task\.columns .*\{NAME: \{gaps: .*kind: text"
    )
    with pytest.raises(ConfigError, match=wrong):
        load(CsvTask(files, "t"), 1, 2)
    task = CsvTask(files, "t", text=("code",))
    assert rows(load(task, 0, 2)).shape == rows(load(task, 1, 2)).shape == (2, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.csv, line 1: the file is empty"),
        ("age,sick\n", r"a\.csv: the file has a header but no rows"),
        ("age,age,sick\n1,2,0\n", r"a\.csv, line 1: column 2 has the name of an earlier one"),
        ("age,sick\n1,0\n\n1,2,0\n", r"a\.csv, line 4: 3 cells, the header has 2"),
        ("age,sik\n1,0\n", r"task\.target: .*a\.csv has no column 'sick'\. Write one of the 2 names"),
        ("age,sick\n1,0\n2,?\n", r"a\.csv, line 3, column 2 \('sick'\): the target is not a number"),
        ("age,sick\n1,0\n2,2\n", r"a\.csv, line 3, column 2 \('sick'\): .*not one of the classes 0 to 1"),
        ("age,sick\n1,0.5\n", r"a\.csv, line 2, column 2 \('sick'\): .*not one of the classes 0 to 1"),
        ("sick\n1\n", r"task\.ignore: .*no column left"),
        ('age,sick\n1,0\n\n"2,0\n3,1\n', r"a\.csv, line 4: a quotation mark opens a cell that never ends"),
        ('age,sick\n1,0\n"2" in,0\n', r"a\.csv, line 3: quotation marks do not enclose a whole cell"),
        # As pandas would take the first column for an index, and shift all others.
        ("age,sick\n" + "".join(f"{i},{i},{i % 2}\n" for i in range(6)), r"a\.csv, line 2: 3 cells, the header has 2"),
        # No rows with gaps.
        ("age,town,sick\n1,2,0\n1,2\n3,4,1\n", r"a\.csv, line 3: 2 cells, the header has 3"),
        ("age,town,sick\n1,2,0\n\n1\n3,4,1\n", r"a\.csv, line 4: 1 cells, the header has 3"),
        (b"age,sick\n\xff\xfe,0\n", r"a\.csv: not a CSV file in UTF-8"),
        (None, r"a\.csv: cannot read the file: No such file"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load(CsvTask((str(tmp_path / "a.csv"),), "sick"))


def test_a_zero_byte_makes_a_text_and_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    load(CsvTask((write(tmp_path, "a.csv", "age,sick\n\x001,0\n"),), "sick"))
    file = write(tmp_path, "a.csv", "\ufeff" + GOOD)
    assert rows(load(CsvTask((file,), "sick", ignore=("age",)))).shape == (20, 8)


@pytest.mark.parametrize("options", [{"classes": 1}, {"classes": 3, "positive_above": 0.0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        CsvTask(**{"files": ("a.csv",), "target": "sick", **options})
    assert caught.value.place == "task.classes"


@pytest.mark.parametrize(
    ("option", "columns"), [("ignore", ("twon",)), ("text", ("twon",)), ("columns", {"twon": ColumnRule()})]
)
def test_unknown_columns_in_options_are_named(tmp_path: Path, option: str, columns: Any) -> None:
    with pytest.raises(ConfigError, match=rf"task\.{option}: .*no column 'twon'\. Write one of the 3 names"):
        load(CsvTask((write(tmp_path, "a.csv", GOOD),), "sick", **{option: columns}))


def test_a_silo_may_lack_an_ignored_column(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = write(tmp_path, "a.csv", GOOD)
    assert rows(load(CsvTask((file,), "sick", ignore=("age", "doctor")))).shape == (20, 8)
    assert "a.csv has no column 'doctor', which task.ignore names" in caplog.text


def test_one_file_a_silo(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.files: 1 files for 2 silos"):
        load(CsvTask((write(tmp_path, "a.csv", GOOD),), "sick"), 0, 2)


@pytest.mark.parametrize("columns", [{}, {"who": ColumnRule(gaps=("unknown",))}], ids=["usual", "named"])
def test_rows_without_a_person_are_of_different_persons(tmp_path: Path, columns: dict[str, ColumnRule]) -> None:
    gap = "unknown" if columns else "NA"
    cells = ["ann", "ann", gap, gap, "", "", "?" if not columns else gap, "bob"]
    text = "age,who,sick\n" + "".join(f"{20 + row},{cell},{row % 2}\n" for row, cell in enumerate(cells))
    task = CsvTask((write(tmp_path, "a.csv", text),), "sick", test_share=0.0, ignore=("who",), columns=columns)
    persons = task.persons(SiloSlot("a", 0, 1, seed=7), "who")
    assert len(persons) == 8 and np.bincount(persons).tolist().count(1) == 6
    assert persons.max() == 6, "ann has two rows, and each other row is of another person"


def test_a_text_without_a_rule_is_no_number_without_a_scale_in_a_private_run(tmp_path: Path) -> None:
    task = CsvTask((write(tmp_path, "a.csv", GOOD),), "sick", scales={"age": ColumnScale(30, 5)}, by_row=True)
    with pytest.raises(ConfigError, match=r"ignore: \[town\]; for words write columns: \{town: \{kind: text\}\}"):
        load(task)
