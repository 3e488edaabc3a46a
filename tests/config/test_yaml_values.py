"""Values of YAML files mean what they look like, or are refused."""

from pathlib import Path

import pytest

from tests.config.test_strategy_files import GOOD, complaint, load

LOOKS = [
    ("010", "8"), ("0x1F", "31"), ("0b11", "3"), ("1_0", "10"), ("1:30", "90"), ("1:30.5", "90.5"), ("1_0.5", "10.5"),
    ("yes", "true"), ("No", "false"), ("on", "true"), ("OFF", "false"), ("!!int '010'", "8"), ("-010", "-8"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "meant"), LOOKS)
@pytest.mark.parametrize("key", ["seed", "name", "train_config.x", "local.resources"])
def test_a_value_that_means_other_than_it_looks_is_refused(tmp_path: Path, value: str, meant: str, key: str) -> None:
    section, _, inner = key.rpartition(".")
    shown = value.removeprefix("!!int ").strip("'")
    error = complaint(tmp_path, GOOD, f"{key}={value}")
    assert f"YAML takes '{shown}' for {meant}" in error.problem and "Quote it" in error.remedy
    line = f"{section}: {{{inner}: {value}}}" if section else f"{inner}: {value}"
    error = complaint(tmp_path, f"{line}\n{GOOD}")
    assert error.place.endswith("mine.yaml, line 1") and f"takes '{shown}' for {meant}" in error.problem


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "+1.0e-3", ".1e-2"])
def test_a_number_with_an_exponent_is_a_number_wherever_it_stands(tmp_path: Path, text: str) -> None:
    """YAML 1.1 reads most of these as text, which free options took without a word."""
    line = f"train_config: {{x: {text}, y: '{text}'}}\n"
    assert load(tmp_path, line + GOOD).train_config == {"x": 0.001, "y": text}
    assert load(tmp_path, GOOD, f"local.learning_rate={text}").local.learning_rate == 0.001


def test_an_octal_number_of_later_versions_is_refused(tmp_path: Path) -> None:
    error = complaint(tmp_path, f"train_config: {{x: 0o17}}\n{GOOD}")
    assert "YAML takes '0o17' for 15" in error.problem


@pytest.mark.parametrize("key", ["on", "~", "no", "null", "010", "1:30"])
def test_a_key_is_named_as_it_is_written(tmp_path: Path, key: str) -> None:
    error = complaint(tmp_path, f"{key}: 1\n{GOOD}")
    assert error.place.endswith(f"line 1, {key}") and error.problem == "unknown key"
    assert load(tmp_path, GOOD, f"train_config={{{key}: 1}}").train_config == {key: 1}
