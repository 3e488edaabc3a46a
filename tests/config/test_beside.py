"""Paths that a file names, and that are none."""

from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import beside
from fedsync.config.strategy import StrategyConfig


def test_a_path_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    assert beside(tmp_path / "a.yaml", "b/c", "a.yaml") == tmp_path.resolve() / "b/c"
    assert beside(tmp_path / "a.yaml", "/d", "a.yaml") == Path("/d")


def test_what_is_no_path_is_refused_where_it_stands(tmp_path: Path) -> None:
    silos = tmp_path / "silos.yaml"
    silos.write_text('silos:\n  - {name: a, speed: 100.0, trace: "x\\0y"}\n')
    with pytest.raises(ConfigError, match=r"silos\.yaml, line 2, silos\.0\.trace: .* cannot be a path"):
        ClusterConfig.load(silos)
    with pytest.raises(ConfigError, match=r"fedavg, task: .* cannot be a path"):
        StrategyConfig.load("fedavg", ['task={kind: csv, files: ["x\\0y"], target: z}'])


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="cannot be a path"):
        beside(tmp_path / "a.yaml", "a", "a.yaml")
