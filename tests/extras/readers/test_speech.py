import wave
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.speech import RATE, SpeechSource, log_mel, read_wav
from tests.extras.readers.damage import survives


def tone(frequency: float, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * RATE)) / RATE)


def write(path: Path, samples: np.ndarray, *, rate: int = RATE, channels: int = 1, width: int = 2) -> Path:
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as recording:
        recording.setnchannels(channels)
        recording.setsampwidth(width)
        recording.setframerate(rate)
        recording.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def fill(folder: Path) -> SpeechSource:
    write(folder / "yes" / "ann_nohash_0.wav", tone(300))
    write(folder / "yes" / "bob_nohash_0.wav", tone(320, 0.5))
    write(folder / "no" / "ann_nohash_1.wav", tone(2000, 1.5))
    write(folder / "_background_noise_" / "hum.wav", tone(50))
    return SpeechSource(str(folder), ("yes", "no"))


def test_words_become_classes_and_speakers_owners(tmp_path: Path) -> None:
    source = fill(tmp_path)
    train, test = source.read()
    # 1 + (16000 - 400) / 160 frames.
    assert train.inputs.shape == (3, 98, 40)
    assert source.shape().inputs == (98, 40)
    np.testing.assert_array_equal(train.targets, [0, 0, 1])
    np.testing.assert_array_equal(train.owners, [0, 1, 0])
    assert test is None


def test_the_list_of_test_recordings_is_followed(tmp_path: Path) -> None:
    source = fill(tmp_path)
    (tmp_path / "testing_list.txt").write_text("yes/bob_nohash_0.wav\nup/ann_nohash_0.wav\n")
    train, test = source.read()
    assert test is not None
    assert (len(train.targets), test.targets.tolist(), test.owners.tolist()) == (2, [0], [1])


def test_a_recording_is_cut_or_filled_up(tmp_path: Path) -> None:
    short = read_wav(write(tmp_path / "a" / "short.wav", tone(300, 0.5)), RATE)
    long = read_wav(write(tmp_path / "a" / "long.wav", tone(300, 1.5)), RATE)
    np.testing.assert_allclose(short[:8000], tone(300, 0.5), atol=1e-4)
    assert not short[8000:].any()
    np.testing.assert_allclose(long, tone(300), atol=1e-4)


@pytest.mark.parametrize("frequency", [300.0, 1000.0, 4000.0])
def test_a_tone_is_loudest_in_its_own_mel_band(frequency: float) -> None:
    features = log_mel(tone(frequency), 40)
    # Band k peaks at corner k + 1 of 42 that are evenly spaced between 20 and 8000 Hz in mel.
    low, high, mine = (2595 * np.log10(1 + f / 700) for f in (20, 8000, frequency))
    nearest = round((mine - low) / (high - low) * 41) - 1
    assert set(features.argmax(axis=1)) == {nearest}
    assert features.mean() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("options", [{"rate": 8000}, {"channels": 2}, {"width": 1}], ids=str)
def test_other_formats_are_named(tmp_path: Path, options: dict[str, int]) -> None:
    path = write(tmp_path / "a" / "x.wav", tone(300), **options)
    with pytest.raises(ConfigError, match=r"x\.wav: another width, number of channels or rate. Convert it"):
        read_wav(path, RATE)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    source = fill(tmp_path)
    with pytest.raises(ConfigError, match="no recordings of up, down"):
        SpeechSource(str(tmp_path), ("up", "down")).read()
    with pytest.raises(ConfigError, match=r"task\.data\.words: '\.\./yes' is not the name of a folder"):
        SpeechSource(str(tmp_path), ("../yes", "no")).read()
    (tmp_path / "yes" / "text.wav").write_text("no sound")
    with pytest.raises(ConfigError, match=r"text\.wav: (not a WAV file|the file ends too early)"):
        source.read()


def test_damaged_files_are_complained_of(tmp_path: Path) -> None:
    path = write(tmp_path / "a" / "x.wav", tone(300, 0.1))
    assert survives(path, lambda: read_wav(path, 1600)) > 5
