"""Every mistake in a silo file, likewise."""

import re
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.names import check_silo_name
from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import shipped_folder
from fedsync.core.speed.curve import Curve

GOOD = """\
silos:
  - {name: a, speed: 300.0}
  - name: b
    speed: 100
    curve: {kind: affine, launch_s: 0.5, saturation: 8}
"""


def load(folder: Path, text: str) -> ClusterConfig:
    path = folder / "silos.yaml"
    path.write_text(text, encoding="utf-8")
    return ClusterConfig.load(path)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    one, two = load(tmp_path, GOOD).silos
    assert (one.name, one.jitter, one.overhead_s, one.memory_samples, one.trace) == ("a", 0.0, 0.0, None, None)
    assert (one.build_curve(), two.build_curve()) == (Curve(300.0), Curve(100.0, 0.5, 8))


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "problem", "remedy"),
    [
        ("name: b", "name: a", 3, "silos.1.name", "'a' is taken by silos.0", "Give each silo its own name"),
        ("name: b", "name: b c", 3, "silos.1.name", "'b c' is not allowed", "[A-Za-z0-9._-]{0,63}"),
        ("name: b", "name: .b", 3, "silos.1.name", "'.b' is not allowed", "[A-Za-z0-9._-]{0,63}"),
        ("name: b", f"name: {65 * 'b'}", 3, "silos.1.name", "is not allowed", "[A-Za-z0-9._-]{0,63}"),
        ("name: b", f"name: {63 * 'b'}\n    count: 2", 3, "silos.1", "too long for 2 silos", "Shorten it"),
        ("name: b", "nmae: b", 3, "silos.1.nmae", "unknown key", "Did you mean 'name'?"),
        ("speed: 100", "speed: 0", 4, "silos.1.speed", "0 is not allowed", "greater than 0"),
        ("speed: 100", "speed: -1", 4, "silos.1.speed", "-1 is not allowed", "greater than 0"),
        ("speed: 100", "speed: 1.0e+10", 4, "silos.1.speed", "10000000000.0 is not allowed", "at most 1000000000"),
        ("speed: 100", "speed: .inf", 4, "silos.1.speed", "inf is not allowed", "Write a finite number"),
        ("    speed: 100\n", "", 3, "silos.1.speed", "missing", "Add this key"),
        ("speed: 300.0", "speed: 300.0, jitter: -1", 2, "silos.0.jitter", "-1 is not allowed", "at least 0"),
        ("speed: 300.0", "speed: 300.0, jitter: 5", 2, "silos.0.jitter", "5 is not allowed", "at most 2"),
        ("speed: 300.0", "speed: 300.0, memory_samples: 0", 2, "silos.0.memory_samples", "0 is not", "at least 1"),
        ("speed: 300.0", "speed: 300.0, trace: no.csv", 2, "silos.0.trace", "no file 'no.csv'", "relative to the silo"),
        ("kind: affine", "kind: afine", 5, "silos.1.curve.kind", "unknown kind 'afine'", "Did you mean 'affine'?"),
        ("{name: a, speed: 300.0}", "a", 2, "silos.0", "a section is expected here, not 'a'", "{key: value}"),
    ],
)
def test_a_mistake_is_named_by_file_line_and_key_with_a_remedy(
    tmp_path: Path, old: str, new: str, line: int, key: str, problem: str, remedy: str
) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, GOOD.replace(old, new))
    error = caught.value
    assert re.search(rf"silos\.yaml, line {line}, {re.escape(key)}$", error.place), error.place
    assert problem in error.problem
    assert remedy in error.remedy


@pytest.mark.parametrize("name", ["b", "-b_9.x", 64 * "b", 62 * "b" + "\n    count: 10"])
def test_names_are_those_that_real_silos_may_have(tmp_path: Path, name: str) -> None:
    _, *more = load(tmp_path, GOOD.replace("name: b", f"name: {name}")).silos
    assert all(check_silo_name(silo.name) for silo in more)


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("silos: []\n", "[] is not allowed", "at least 1"),
        ("silos: {a: 3}\n", "{'a': 3} is not allowed", "Write a list"),
        ("machines: []\n", "unknown key", "Allowed: silos"),
        ("", "missing", "Add this key"),
    ],
)
def test_what_is_no_list_of_silos(tmp_path: Path, text: str, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_a_trace_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "load.csv").write_text("seconds,factor\n0,1\n")
    config = load(tmp_path, GOOD.replace("speed: 300.0", "speed: 300.0, trace: load.csv"))
    assert config.silos[0].trace == str((tmp_path / "load.csv").resolve())


def test_a_missing_file_lists_what_is_shipped() -> None:
    with pytest.raises(ConfigError, match=r"heterro: no such file\. Did you mean 'hetero'\? Allowed: .*hetero"):
        ClusterConfig.load("heterro")


def test_a_path_that_cannot_be_used_is_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match=r"^x{300}: File name too long\. Check the path"):
        ClusterConfig.load(300 * "x")


@pytest.mark.parametrize("path", sorted((shipped_folder() / "silos").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_silo_file_loads_by_name(path: Path) -> None:
    assert len(ClusterConfig.load(path.stem).silos) >= 1
