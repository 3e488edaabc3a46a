"""Speech Commands: one folder a word with WAV files, as log-mel features."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.tasks.readers.user_files import check_cells, reading
from fedsync.tasks.samples import DataShape, Samples

RATE = 16_000
FRAME = 400
HOP = 160
_FOURIER = 512
_TESTING = "testing_list.txt"
_QUIET = 1e-6


@dataclass(frozen=True, slots=True)
class SpeechSource:
    """Sequences, float32 [n, frames, bands], words as classes, and speakers as owners.

    Recordings are cut or filled up with silence to ``seconds``. If the folder has a ``testing_list.txt``, its
    recordings are the test samples. A speaker is what stands before ``_nohash_`` in a file's name.

    Args:
        folder: with one folder a word.
        words: the classes, in this order; silos must name the same.
        seconds: length of a recording.
        bands: mel bands.
    """

    folder: str
    words: tuple[str, ...]
    seconds: float = 1.0
    bands: int = 40

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
            raise ConfigError(f"{self.folder}/{_TESTING}", "the list leaves nothing to train on", "Mend the list")
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
            raise ConfigError(self.folder, problem, "Mend task.data.folder or task.data.words")
        return paths, np.array(labels, dtype=np.int64)

    def _testing(self) -> frozenset[str]:
        path = Path(self.folder) / _TESTING
        if not path.is_file():
            return frozenset()
        with reading(path), open_data(path) as stream:
            return frozenset(stream.read().decode("utf-8", "replace").split())


def read_wav(path: Path, length: int) -> NDArray[np.float64]:
    """The first ``length`` samples in -1..1, float64 [length], of a recording; silence fills it up.

    Raises:
        ConfigError: not a WAV file, or not one of 16 bits, one channel and 16,000 samples a second.
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
    """Logarithm of the energy in mel bands, float32 [frames, bands], less its mean over the recording.

    Frames of 25 ms every 10 ms under a Hann window; triangular bands from 20 Hz to half the rate, evenly
    spaced in mel = 2595 log10(1 + f / 700).

    Args:
        samples: at 16,000 a second, float64 [n], at least a frame.
        bands: how many.
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
