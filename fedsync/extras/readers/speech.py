"""Reader of Speech Commands: one folder per word with WAV files, converted to log-mel features."""

from __future__ import annotations

import wave
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, MinLen
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.extras.readers.samples import DataShape, Samples, Source
from fedsync.policies.schema import Several, register
from fedsync.tasks.readers.user_files import check_cells, reading

RATE = 16_000
FRAME = 400
HOP = 160
_FOURIER = 512
_TESTING = "testing_list.txt"
_QUIET = 1e-6


@register("speech")
@dataclass(frozen=True, slots=True)
class SpeechSource(Source):
    """Speech Commands: a folder with one subfolder per word.

    Sequences are float32 [n, frames, bands], and speakers are owners. Recordings are cut or padded with silence to
    ``seconds``. Recordings listed in an optional ``testing_list.txt`` in the folder are the test samples. The speaker
    is the part of a file's name before ``_nohash_``.
    """

    folder: str
    """Folder with one subfolder per word."""

    words: Annotated[list[str], MinLen(2)] = field(hash=False)
    """Words, which are the classes in this order; all silos must list the same words."""

    seconds: Annotated[float, Ge(0.1)] = 1.0
    """Length to which recordings are cut or padded [s]."""

    bands: Several = 40
    """Number of mel bands."""

    def shape(self) -> DataShape:
        return DataShape((_frames(self._length), self.bands), len(self.words))

    def read(self) -> tuple[Samples, Samples | None]:
        paths, labels = self._recordings()
        check_cells(self.folder, len(paths) * _frames(self._length) * self.bands)
        features = np.stack([log_mel(read_wav(path, self._length), self.bands) for path in paths])
        names = [path.name.partition("_nohash_")[0] for path in paths]
        owners = np.unique(names, return_inverse=True)[1].astype(np.int64).reshape(-1)
        everything = Samples(features, labels, owners)
        listed = self._testing()
        apart = np.array([f"{path.parent.name}/{path.name}" in listed for path in paths])
        if not apart.any():
            return everything, None
        if apart.all():
            raise ConfigError(f"{self.folder}/{_TESTING}", "the list leaves no recordings for training", "Fix the list")
        return everything.take(np.flatnonzero(~apart)), everything.take(np.flatnonzero(apart))

    @property
    def _length(self) -> int:
        return round(self.seconds * RATE)

    def _recordings(self) -> tuple[list[Path], NDArray[np.int64]]:
        paths: list[Path] = []
        labels: list[int] = []
        for label, word in enumerate(self.words):
            if not word or word in (".", "..") or Path(word).name != word:
                raise ConfigError("task.data.words", f"{word!r} is not the name of a folder", "Write plain names")
            found = sorted((Path(self.folder) / word).glob("*.wav"))
            paths += found
            labels += [label] * len(found)
        if not paths:
            problem = f"there are no recordings of {', '.join(self.words)}"
            raise ConfigError(self.folder, problem, "Correct task.data.folder or task.data.words")
        return paths, np.array(labels, dtype=np.int64)

    def _testing(self) -> frozenset[str]:
        path = Path(self.folder) / _TESTING
        if not path.is_file():
            return frozenset()
        with reading(path), open_data(path) as stream:
            return frozenset(stream.read().decode("utf-8", "replace").split())


def read_wav(path: Path, length: int) -> NDArray[np.float64]:
    """First ``length`` samples of a recording in -1..1, float64 [length], padded with silence.

    Raises `ConfigError` unless it is a WAV file of 16 bits, one channel and 16,000 samples per second.
    """
    try:
        with reading(path), open_data(path) as stream, wave.open(stream, "rb") as recording:
            found = (recording.getsampwidth(), recording.getnchannels(), recording.getframerate())
            content = recording.readframes(length) if found == (2, 1, RATE) else b""
    except wave.Error as error:
        raise ConfigError(str(path), "not a WAV file", "Copy it again, or remove it") from error
    if found != (2, 1, RATE):
        problem = "another width, number of channels or rate"
        raise ConfigError(str(path), problem, f"Convert it to 16 bits, 1 channel, {RATE} samples a second")
    samples = np.frombuffer(content[: len(content) // 2 * 2], dtype="<i2") / 32768
    return np.pad(samples, (0, length - len(samples)))


def log_mel(samples: NDArray[np.float64], bands: int) -> NDArray[np.float32]:
    """Log energy in mel bands minus its mean over the recording, float32 [frames, bands].

    Frames of 25 ms every 10 ms under a Hann window; triangular bands from 20 Hz to half the rate, evenly spaced in
    mel = 2595 log10(1 + f / 700). ``samples`` are float64 [n], 16,000 per second, at least one frame.
    """
    frames = np.lib.stride_tricks.sliding_window_view(samples, FRAME)[::HOP] * np.hanning(FRAME)
    power = np.abs(np.fft.rfft(frames, _FOURIER)) ** 2
    energy = np.log(power @ _filters(bands) + _QUIET)
    return np.asarray(energy - energy.mean(), dtype=np.float32)


def _frames(length: int) -> int:
    return (length - FRAME) // HOP + 1


@cache
def _filters(bands: int) -> NDArray[np.float64]:
    """Weight of each frequency in each band, float64 [257, bands]."""

    def mel(frequency: float) -> float:
        return float(2595 * np.log10(1 + frequency / 700))

    corners = 700 * (10 ** (np.linspace(mel(20.0), mel(RATE / 2), bands + 2) / 2595) - 1)
    frequencies = np.fft.rfftfreq(_FOURIER, 1 / RATE)[:, None]
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    weights = np.minimum((frequencies - low) / (middle - low), (high - frequencies) / (high - middle))
    return np.maximum(weights, 0.0)
