"""``fedsync predict``: the contract of its files, and what it says to a bad one."""

import json
import re
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.predictors.backtest import read_trace
from tests.commands.call import call

HEADER = "step,speed,cpu,memory\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_it_prints_a_table_and_writes_the_errors(tmp_path: Path) -> None:
    """Speeds 10, 20, 40, 30, warm-up 2. Memoryless is 20 and 10 off; the average says 12 and 17.6, 28 and 12.4 off."""
    rows = "".join(f"{step},{speed},0.5,0.25\n" for step, speed in enumerate((10, 20, 40, 30)))
    trace, out = write(tmp_path, HEADER + rows), tmp_path / "out.json"
    shown = call("predict", trace, "--predictors", "memoryless,narx", "--warmup", "2", "--out", out)
    assert "memoryless" in shown
    content = json.loads(out.read_text())
    assert {key: content[key] for key in ("steps", "warmup")} == {"steps": 4, "warmup": 2}
    assert list(content["predictors"]) == ["memoryless", "narx"]
    assert content["predictors"]["memoryless"] == {"rmse": pytest.approx(250**0.5), "mae": 15.0}
    # Too few for a network: the average stands in.
    assert content["predictors"]["narx"] == {
        "rmse": pytest.approx(((28**2 + 12.4**2) / 2) ** 0.5),
        "mae": pytest.approx(20.2),
    }


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "line 1"),
        ("step,speed,cpu\n0,1,1\n", "'memory' is missing"),
        (HEADER + "0,1,0.5,0.5\n1,x,0.5,0.5\n", "line 3, column 'speed'"),
        (HEADER + "0,1,0.5\n", "line 2, column 'memory'"),
        (HEADER + "0,0,0.5,0.5\n", "line 2, column 'speed'"),
        (HEADER + "0,inf,0.5,0.5\n", "line 2, column 'speed'"),
        (HEADER + "0,1,0.5,0.5\n1,1e-160,0.5,0.5\n", "line 3, column 'speed': 1e-160. Write samples per second, from"),
        (HEADER + "0,9.9e-10,0.5,0.5\n", "from 1e-09 to 1e+09"),
        (HEADER + "0,1.1e9,0.5,0.5\n", "line 2, column 'speed': 1.1e+09"),
        (HEADER + "0,1,50,0.5\n", "line 2, column 'cpu'"),
        (HEADER + "0,1,0.5,-0.1\n", "line 2, column 'memory'"),
        (HEADER + "1,1,0.5,0.5\n1,1,0.5,0.5\n", "line 3, column 'step'"),
    ],
)
def test_a_bad_file_is_named_with_line_and_column(tmp_path: Path, text: str, place: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_trace(write(tmp_path, text))
    assert place in str(found.value)
    assert "trace.csv" in str(found.value)


def test_columns_may_come_in_any_order_with_others_between(tmp_path: Path) -> None:
    text = "\ufeffmemory, speed,note,cpu,step\n0.25,7.5,x,0.5,3\n\n0.5,8,,1,4\n"
    steps = read_trace(write(tmp_path, text))
    assert [(step.speed, step.cpu, step.memory) for step in steps] == [(7.5, 0.5, 0.25), (8.0, 1.0, 0.5)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--predictors", "nrax"], "Did you mean 'narx'"),
        (["--predictors", ","], "names none"),
        (["--warmup", "2"], "2 steps, of which 2 are warm-up"),
        (["--out", "nowhere/out.json"], "no folder"),
        (["--out", "."], "'.' is a folder"),
    ],
)
def test_bad_options_are_the_users_mistake(tmp_path: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        call("predict", write(tmp_path, HEADER + "0,1,0.5,0.5\n1,1,0.5,0.5\n"), *arguments)


@pytest.mark.usefixtures("full_disk")
def test_the_file_of_a_former_run_stays_whole_where_the_disk_is_full(tmp_path: Path) -> None:
    trace, out = write(tmp_path, HEADER + "0,1,0.5,0.5\n1,1,0.5,0.5\n"), tmp_path / "out.json"
    out.write_text("old")
    with pytest.raises(ConfigError, match="No space left on device"):
        call("predict", trace, "--predictors", "ema", "--warmup", "1", "--out", out)
    assert out.read_text() == "old"


def test_a_missing_file_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Name a CSV file"):
        read_trace(tmp_path / "none.csv")
