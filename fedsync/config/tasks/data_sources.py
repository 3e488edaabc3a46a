"""Configuration of data sources: generators that need no download, and readers of the user's files."""

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
    """Base of data sources.

    ``paths`` lists the keys that hold paths. ``libraries`` lists modules that are imported late and load slowly.
    """

    paths: ClassVar[tuple[str, ...]] = ()
    libraries: ClassVar[tuple[str, ...]] = ()

    def build(self) -> Source:
        raise NotImplementedError

    def relocated(self, locate: Callable[[str], str]) -> Self:
        given = {name: getattr(self, name) for name in self.paths}
        return self.model_copy(update={name: locate(path) for name, path in given.items() if path is not None})


class Digits28Config(DataSection):
    """Scikit-learn's digits, enlarged to 28 x 28 and randomly distorted: any number of images, without a download."""

    libraries: ClassVar[tuple[str, ...]] = ("scipy.ndimage", "sklearn.datasets")
    kind: Literal["digits28"]
    samples: PositiveInt = 6000
    """Number of training images, over all silos."""

    test_samples: PositiveInt = 1000
    """Number of test images."""

    def build(self) -> Source:
        from fedsync.extras.generators.digits28 import Digits28Source

        return Digits28Source(self.samples, self.test_samples)


class KeywordsConfig(DataSection):
    """Synthetic spoken words, as sequences of ``frames`` of ``bands`` features."""

    kind: Literal["keywords"]
    samples: PositiveInt = 4000
    """Number of sequences, over all silos; the words alternate."""

    words: Classes = 10
    """Number of words, which are the classes."""

    frames: Annotated[int, Field(ge=2)] = 32
    """Number of frames in a sequence."""

    bands: Annotated[int, Field(ge=2)] = 20
    """Number of features of a frame."""

    noise: NonNegative = 0.3
    """Standard deviation of the noise; the peak of a formant is 1."""

    def build(self) -> Source:
        from fedsync.extras.generators.keywords import KeywordsSource

        return KeywordsSource(self.samples, self.words, self.frames, self.bands, self.noise)


class BlobsConfig(DataSection):
    """Points around random centres."""

    kind: Literal["blobs"]
    samples: PositiveInt = 2000
    """Number of points, over all silos; the blobs alternate."""

    blobs: PositiveInt = 5
    """Number of centres."""

    features: PositiveInt = 4
    """Number of dimensions of a point."""

    apart: NonNegative = 4.0
    """Standard deviation of the centres; the standard deviation of points around a centre is 1."""

    def build(self) -> Source:
        from fedsync.extras.generators.numbers import BlobsSource

        return BlobsSource(self.samples, self.blobs, self.features, self.apart)


class SparseConfig(DataSection):
    """Sparse rows of many features, with a linear target of ``informative`` features."""

    kind: Literal["sparse"]
    samples: PositiveInt = 2000
    """Number of rows, over all silos."""

    features: PositiveInt = 10_000
    """Number of columns."""

    nonzeros: PositiveInt = 20
    """Number of non-zero values in a row."""

    informative: PositiveInt = 100
    """Number of features that determine the target."""

    noise: NonNegative = 0.1
    """Standard deviation of the noise, relative to the standard deviation of the noiseless target."""

    target: Literal["class", "number"] = "class"
    """Kind of target: two classes, or a number."""

    def build(self) -> Source:
        from fedsync.extras.generators.numbers import SparseSource

        return SparseSource(self.samples, self.features, self.nonzeros, self.informative, self.noise, self.target)


class RatingsConfig(DataSection):
    """Users' ratings of items; a share of ``known`` is known, and the true ratings have a low ``rank``."""

    kind: Literal["ratings"]
    users: PositiveInt = 500
    """Number of users; a user is a row and a sample."""

    items: PositiveInt = 40
    """Number of items, which are the columns."""

    rank: PositiveInt = 3
    """Rank of the matrix of true ratings."""

    known: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of ratings that are known."""

    noise: NonNegative = 0.1
    """Standard deviation of the noise; the standard deviation of the true ratings is 1."""

    non_negative: bool = False
    """Whether the true vectors have no negative values, so that no rating is below 0."""

    def build(self) -> Source:
        from fedsync.extras.generators.numbers import RatingsSource

        return RatingsSource(self.users, self.items, self.rank, self.known, self.noise, self.non_negative)


class IdxConfig(DataSection):
    """MNIST, Fashion-MNIST or EMNIST: a folder with IDX files, plain or .gz, under their usual names."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["idx"]
    folder: str
    """Folder with the IDX files."""

    classes: Classes = 10
    """Number of classes."""

    first_class: Annotated[int, Field(ge=0)] = 0
    """Label of the first class in the files; 1 for EMNIST's letters."""

    def build(self) -> Source:
        from fedsync.extras.readers.idx import IdxSource

        return IdxSource(self.folder, self.classes, self.first_class)


class CifarConfig(DataSection):
    """CIFAR-10 or CIFAR-100: a folder with the files of the Python version."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["cifar"]
    folder: str
    """Folder with the files."""

    classes: Literal[10, 100] = 10
    """Number of classes: 10 for CIFAR-10, 100 for CIFAR-100."""

    def build(self) -> Source:
        from fedsync.extras.readers.cifar import CifarSource

        return CifarSource(self.folder, self.classes)


class FemnistConfig(DataSection):
    """FEMNIST in the format of LEAF: a folder of JSON files, or of folders ``train`` and ``test``."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["femnist"]
    folder: str
    """Folder that LEAF's scripts have filled."""

    classes: Classes = 62
    """Number of classes."""

    side: Annotated[int, Field(ge=4)] = 28
    """Width and height of an image [pixels]."""

    def build(self) -> Source:
        from fedsync.extras.readers.leaf import LeafSource

        return LeafSource(self.folder, self.classes, self.side)


class SpeechConfig(DataSection):
    """Speech Commands: a folder with one subfolder per word."""

    paths: ClassVar[tuple[str, ...]] = ("folder",)

    kind: Literal["speech"]
    folder: str
    """Folder with one subfolder per word."""

    words: Annotated[list[str], Field(min_length=2)]
    """Words, which are the classes in this order; all silos must list the same words."""

    seconds: Annotated[float, Field(ge=0.1)] = 1.0
    """Length to which recordings are cut or padded [s]."""

    bands: Annotated[int, Field(ge=2)] = 40
    """Number of mel bands."""

    def build(self) -> Source:
        from fedsync.extras.readers.speech import SpeechSource

        return SpeechSource(self.folder, tuple(self.words), self.seconds, self.bands)


class LibsvmConfig(DataSection):
    """A file in the format of libsvm."""

    paths: ClassVar[tuple[str, ...]] = ("file", "test_file")

    kind: Literal["libsvm"]
    file: str
    """File with the training samples."""

    features: PositiveInt
    """Number of columns; all silos must use the same number, whatever their own rows need."""

    classes: ClassesOrNumbers = 2
    """Number of classes; 0 for numeric targets."""

    test_file: str | None = None
    """File with the test samples; left out, the task holds out a share of the training samples."""

    def build(self) -> Source:
        from fedsync.extras.readers.libsvm import LibsvmSource

        return LibsvmSource(self.file, self.features, self.classes, self.test_file)


class TableConfig(DataSection):
    """A table of numbers, CSV or Parquet."""

    paths: ClassVar[tuple[str, ...]] = ("file",)

    kind: Literal["table"]
    file: str
    """File with the table: Parquet if its name ends in ``.parquet`` or ``.pq``, otherwise CSV."""

    target: str | None = None
    """Column to predict; null for tasks without a target (clusters, mixtures)."""

    classes: ClassesOrNumbers = 2
    """Number of classes; 0 for numeric targets."""

    ignore: list[str] = Field(default_factory=list)
    """Names of columns to leave out."""

    def build(self) -> Source:
        from fedsync.tasks.readers.tabular import TableSource

        return TableSource(self.file, self.target, self.classes, tuple(self.ignore))


class NpzConfig(DataSection):
    """NumPy file with the arrays ``inputs`` and ``targets``."""

    paths: ClassVar[tuple[str, ...]] = ("file",)

    kind: Literal["npz"]
    file: str
    """The ``.npz`` file."""

    classes: ClassesOrNumbers = 10
    """Number of classes; 0 for numeric targets."""

    def build(self, missing: bool = False) -> Source:
        """Return the source; ``missing`` allows unknown inputs (NaN)."""
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
