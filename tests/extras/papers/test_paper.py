"""Tables for papers: what they have, and that they compile."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.extras.papers.paper import comma_separated, latex, result_files
from tests.extras.report.make import told
from tests.extras.report.test_model_card import EVIL


def test_the_table_for_a_paper(tmp_path: Path) -> None:
    files = result_files(told(tmp_path, ["a", "b", "c"]))
    assert "    {a} & {0.800 [0.770, 0.830]} & " in files["results.tex"]
    assert files["results.tex"].count(r"\\") == 1 + 4, "head, all silos, three silos"
    for mark in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{lrrrrr}"):
        assert mark in files["results.tex"]
    assert "| a | 0.800 \\[0.770, 0.830\\] | " in files["results.md"]
    rows = list(csv.DictReader(files["results.csv"].splitlines()))
    findings = {(row["model"], row["split"]) for row in rows}
    assert findings == {("last", "validation"), ("last", "test"), ("best", "test")}
    (row,) = [row for row in rows if (row["model"], row["silo"], row["metric"]) == ("best", "a", "auroc")]
    assert (row["split"], float(row["value"]), float(row["low"]), row["samples"]) == ("test", 0.8, 0.77, "70")
    (none,) = [row for row in rows if (row["model"], row["silo"], row["metric"]) == ("best", "c", "auroc")]
    assert (none["value"], none["low"]) == ("", "")


def check_latex(text: str) -> None:
    """Check for faults that stop TeX: open braces and environments, marks that are no letters, rows too long."""
    bare = re.sub(r"\\(?:[&%$#_{}\\]|text\w+\{\})", "", text)  # escapes, ends of rows
    assert bare.count("{") == bare.count("}") and not set("%$#_~^<>|") & set(bare)
    opened: list[str] = []
    for word, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        assert word == "begin" or opened.pop() == name
        opened += [name] if word == "begin" else []
    assert not opened and set(re.findall(r"\\([a-z]+)", bare)) <= {
        *("begin", "end", "centering", "caption", "toprule", "midrule", "bottomrule")
    }
    for table in text.split(r"\begin{tabular}{")[1:]:
        columns = len(table.split("}", 1)[0])
        rows = [line for line in table.splitlines() if line.endswith(r"\\")]
        assert rows and all(len(re.findall(r"(?<!\\)&", row)) == columns - 1 for row in rows)
        for row in rows:
            depth = 0
            for mark in re.findall(r"(?<!\\)[{}]", row):
                depth += 1 if mark == "{" else -1
                assert depth >= 0
            assert depth == 0


@pytest.mark.parametrize("names", [["a", "b", "c"], [EVIL, "50 %_of & all", "\\\\ {"]])
def test_tables_compile(tmp_path: Path, names: list[str]) -> None:
    run = told(tmp_path, names)
    check_latex(result_files(replace(run, summary={**run.summary, "strategy": EVIL}))["results.tex"])


@pytest.mark.parametrize("wrong", ["a_b", "5 %", "a & b", "{", "\\input"])
def test_what_does_not_compile_is_found(wrong: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        check_latex(latex(["a", "b"], [["x", "y"]], "c").replace("{x}", f"{{{wrong}}}"))


@pytest.mark.parametrize("text", ["=1+1", "@x", "+1"])
def test_a_name_is_no_formula(text: str) -> None:
    assert comma_separated(["a"], [[text]]) == f"a\n'{text}\n"
