"""Where samples come from: generators that need no download, and readers of files that the user has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from fedsync.config.sections.section import Section

if TYPE_CHECKING:
    from fedsync.tasks.samples import Source

PositiveInt = Annotated[int, Field(ge=1)]
Classes = Annotated[int, Field(ge=2)]
ClassesOrNumbers = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]


class DataSection(Section):
    """One kind of data; ``paths`` are the names of its keys that hold paths.

    ``libraries`` are modules that it imports late, and that take long.
    """

    paths: ClassVar[tuple[str, ...]] = ()
    libraries: ClassVar[tuple[str, ...]] = ()

    def build(self) -> Source:
        raise NotImplementedError

    def relocated(self, locate: Callable[[str], str]) -> Self:
        given = {name: getattr(self, name) for name in self.paths}
        return self.model_copy(update={name: locate(path) for name, path in given.items() if path is not None})


class Digits28Config(DataSection):
    """Scikit-learn's digits, enlarged to 28 x 28 and bent at random: as many as wanted, without a download."""

    libraries: ClassVar[tuple[str, ...]] = ("scipy.ndimage", "sklearn.datasets")
    kind: Literal["digits28"]
    samples: PositiveInt = 6000
    """Images to train on, over all silos."""

    test_samples: PositiveInt = 1000
    """Images to test on."""

    def build(self) -> Source:
        from fedsync.tasks.generators.digits28 import Digits28Source

        return Digits28Source(self.samples, self.test_samples)


class KeywordsConfig(DataSection):
    """Made-up spoken words, as sequences of ``frames`` of ``bands`` features."""

    kind: Literal["keywords"]
    samples: PositiveInt = 4000
    """Sequences, over all silos; words take turns."""

    words: Classes = 10
    """Number of classes."""

    frames: Annotated[int, Field(ge=2)] = 32
    """Length of a sequence."""

    bands: Annotated[int, Field(ge=2)] = 20
    """Features of a frame."""

    noise: NonNegative = 0.3
    """Standard deviation of the noise; a formant's peak is 1."""

    def build(self) -> Source:
        from fedsync.tasks.generators.keywords import KeywordsSource

        return KeywordsSource(self.samples, self.words, self.frames, self.bands, self.noise)


class BlobsConfig(DataSection):
    """Points around random centres."""

    kind: Literal["blobs"]
    samples: PositiveInt = 2000
    """Points, over all silos; blobs take turns."""

    blobs: PositiveInt = 5
    """Number of centres."""

    features: PositiveInt = 4
    """Dimensions of a point."""

    apart: NonNegative = 4.0
    """Standard deviation of the centres, that of the points being 1."""

    def build(self) -> Source:
        from fedsync.tasks.generators.numbers import BlobsSource

        return BlobsSource(self.samples, self.blobs, self.features, self.apart)


class SparseConfig(DataSection):
    """Rows of many features of which few are not zero, with a linear truth of ``informative`` features."""

    kind: Literal["sparse"]
    samples: PositiveInt = 2000
    """Rows, over all silos."""

    features: PositiveInt = 10_000
    """Number of columns."""

    nonzeros: PositiveInt = 20
    """Values of a row that are not zero."""

    informative: PositiveInt = 100
    """Features that count."""

    noise: NonNegative = 0.1
    """Standard deviation of the noise, in units of the truth's own."""

    target: Literal["class", "number"] = "class"
    """Whether targets are two classes, or numbers."""

    def build(self) -> Source:
        from fedsync.tasks.generators.numbers import SparseSource

        return SparseSource(self.samples, self.features, self.nonzeros, self.informative, self.noise, self.target)


class RatingsConfig(DataSection):
    """Users' ratings of items, of which a share of ``known`` is known; the truth has a low ``rank``."""

    kind: Literal["ratings"]
    users: PositiveInt = 500
    """Rows, which are the samples."""

    items: PositiveInt = 40
    """Columns."""

    rank: PositiveInt = 3
    """Rank of the truth."""

    known: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the ratings that are known."""

    noise: NonNegative = 0.1
    """Standard deviation of the noise; that of the truth is 1."""

    non_negative: bool = False
    """Whether the truth is of vectors without negative values, so that no rating is below 0."""

    def build(self) -> Source:
        from fedsync.tasks.generators.numbers import RatingsSource

        return RatingsSource(self.users, self.items, self.rank, self.known, self.noise, self.non_negative)


class IdxConfig(DataSection):
    """MNIST, Fashion-MNIST, EMNIST: a folder with IDX files, plain or .gz, under their usual names."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["idx"]
    folder: str
    """Folder with the files."""

    classes: Classes = 10
    """Number of classes."""

    first_class: Annotated[int, Field(ge=0)] = 0
    """Number of the first class in the files; 1 for EMNIST's letters."""

    def build(self) -> Source:
        from fedsync.tasks.readers.idx import IdxSource

        return IdxSource(self.folder, self.classes, self.first_class)


class CifarConfig(DataSection):
    """CIFAR-10 or CIFAR-100: a folder with the files of the Python version."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["cifar"]
    folder: str
    """Folder with the files."""

    classes: Literal[10, 100] = 10
    """10 for CIFAR-10, 100 for CIFAR-100."""

    def build(self) -> Source:
        from fedsync.tasks.readers.cifar import CifarSource

        return CifarSource(self.folder, self.classes)


class FemnistConfig(DataSection):
    """FEMNIST as LEAF writes it: a folder of JSON files, or of folders ``train`` and ``test``."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["femnist"]
    folder: str
    """Folder as LEAF's scripts fill it."""

    classes: Classes = 62
    """Number of classes."""

    side: Annotated[int, Field(ge=4)] = 28
    """Pixels of a side."""

    def build(self) -> Source:
        from fedsync.tasks.readers.leaf import LeafSource

        return LeafSource(self.folder, self.classes, self.side)


class SpeechConfig(DataSection):
    """Speech Commands: a folder with one folder a word."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["speech"]
    folder: str
    """Folder with one folder a word."""

    words: Annotated[list[str], Field(min_length=2)]
    """The classes, in this order; silos must name the same."""

    seconds: Annotated[float, Field(ge=0.1)] = 1.0
    """Recordings are cut or filled up to this length [s]."""

    bands: Annotated[int, Field(ge=2)] = 40
    """Mel bands."""

    def build(self) -> Source:
        from fedsync.tasks.readers.speech import SpeechSource

        return SpeechSource(self.folder, tuple(self.words), self.seconds, self.bands)


class LibsvmConfig(DataSection):
    """A file in the format of libsvm."""

    paths: ClassVar[tuple[str, ...]] = ("file", "test_file")

    kind: Literal["libsvm"]
    file: str
    """The file with the training samples."""

    features: PositiveInt
    """Number of columns; silos must agree on it, whatever their own rows need."""

    classes: ClassesOrNumbers = 2
    """Number of classes; 0 for targets that are numbers."""

    test_file: str | None = None
    """A file with test samples."""

    def build(self) -> Source:
        from fedsync.tasks.readers.libsvm import LibsvmSource

        return LibsvmSource(self.file, self.features, self.classes, self.test_file)


class TableConfig(DataSection):
    """A table of numbers, CSV or Parquet."""

    paths: ClassVar[tuple[str, ...]] = ("file",)

    kind: Literal["table"]
    file: str
    """``.parquet`` or ``.pq`` is read as Parquet, all else as CSV."""

    target: str | None = None
    """Column to predict; null where nothing is (clusters, mixtures)."""

    classes: ClassesOrNumbers = 2
    """Number of classes; 0 for targets that are numbers."""

    ignore: list[str] = Field(default_factory=list)
    """Columns to leave out."""

    def build(self) -> Source:
        from fedsync.tasks.readers.tabular import TableSource

        return TableSource(self.file, self.target, self.classes, tuple(self.ignore))


class NpzConfig(DataSection):
    """A file of NumPy with the arrays ``inputs`` and ``targets``."""

    paths: ClassVar[tuple[str, ...]] = ("file",)

    kind: Literal["npz"]
    file: str
    """The ``.npz`` file."""

    classes: ClassesOrNumbers = 10
    """Number of classes; 0 for targets that are numbers."""

    def build(self, missing: bool = False) -> Source:
        """The source; ``missing`` lets inputs be unknown (NaN)."""
        from fedsync.tasks.readers.npz import NpzSource

        return NpzSource(self.file, self.classes, missing)


ImageData = Annotated[Digits28Config | IdxConfig | CifarConfig | FemnistConfig | NpzConfig, Field(discriminator="kind")]
SequenceData = Annotated[KeywordsConfig | SpeechConfig | NpzConfig, Field(discriminator="kind")]
AnyData = Annotated[
    BlobsConfig
    | SparseConfig
    | LibsvmConfig
    | TableConfig
    | NpzConfig
    | Digits28Config
    | IdxConfig
    | CifarConfig
    | FemnistConfig
    | KeywordsConfig
    | SpeechConfig,
    Field(discriminator="kind"),
]
RatingsData = Annotated[RatingsConfig | NpzConfig, Field(discriminator="kind")]
