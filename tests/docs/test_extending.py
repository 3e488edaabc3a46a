"""The parts that docs/extending.md adds run as they stand there, and do what the page says."""

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
RUN = """\
from pathlib import Path
import data_quorum, window  # registers the kinds, as a file of the package does by lying there
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.sim.timing_only import run_timing
config = StrategyConfig.load("data-quorum.yaml", ["predictor={kind: window, size: 3}"])
run_timing(config, ClusterConfig.load("hetero"), Path("run"))
"""


def test_the_barrier_and_the_predictor_run_and_commit_at_60_percent_of_the_examples(tmp_path: Path) -> None:
    blocks = re.findall(r"```(?:python|yaml) title=\"([^\"]+)\"\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for title, text in blocks:
        (tmp_path / Path(title).name).write_text(text, encoding="utf-8")
    # A process of its own: a kind that is registered stays.
    subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, check=True, timeout=120)
    entries = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()[1:]]
    reasons = [entry["reason"] for entry in entries if any(one["type"] == "Commit" for one in entry["actions"])]
    shares = [int(percent) for reason in reasons for percent in re.findall(r"with (\d+)% of the examples", reason)[:1]]
    assert len(shares) == 20 and all(60 <= share < 100 for share in shares), "nobody waits for all of five silos"
