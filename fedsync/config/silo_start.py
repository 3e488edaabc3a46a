"""A real silo's own file: where the server is, what proves who the silo is, and what its owner allows.

What is left out is closed: no file, no emulated machine, no model of the server's choice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Discriminator, Field, PrivateAttr, Tag, model_validator

from fedsync.common.errors import ConfigError
from fedsync.common.names import SILO_NAME
from fedsync.common.proxies import DIRECT, Proxy
from fedsync.config.locate import beside
from fedsync.config.sections.presence import PresenceConfig
from fedsync.config.sections.section import Section
from fedsync.config.yaml_file import YamlFile

ADDRESS = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$"
"""``host:port``; an IPv6 address in brackets."""

LONGEST_STATE = 60
"""Bytes of the path of a silo's state folder: sockets below it may have about 100."""

Model = TypeVar("Model", bound=Section)


class LogsConfig(Section):
    """Each process has a log of at most ``bytes``, and ``keep`` older ones."""

    bytes: Annotated[int, Field(ge=10_000)] = 10_000_000
    """Size at which a process's log is put aside and a new one begins [bytes]."""

    keep: Annotated[int, Field(ge=1, le=1000)] = 5
    """Older logs that are kept, of each process."""


class SealConfig(Section):
    """What a run must at least seal, at a silo that has keys; one that seals less is refused."""

    masks: bool = False
    """Whether updates must carry masks (``cipher: {kind: masked}``), without which the server and one silo together can
    read every update."""

    clear: list[str] = Field(default_factory=list)
    """Patterns of names of tensors that may travel in the clear where a run seals only some. Empty: none may."""

    members: Annotated[int, Field(ge=1)] = 2
    """Least updates that a version must add (``cipher: {members: 2}``). At 1, silos open sums of one, and so each
    other's updates."""

    work_ratio: Annotated[float, Field(ge=1)] = 4.0
    """Largest ratio of the work of two silos in a sum under masks (``cipher: {kind: masked,
    work_ratio: 4}``), at most. The more, the more one update stands out in the sum."""

    colluding: Annotated[int, Field(ge=1)] = 1
    """Silos that a run must take to work with the server, or to lie, at least (``cipher: {colluding: 1}``)."""

    quorum: Annotated[int, Field(ge=1)] = 2
    """Least silos of a run's rounds. Figures are told of more than half as many."""

    metrics: Literal["plain", "sealed"] = "sealed"
    """Whether losses, and how the model did on the silo's test data, must be ``sealed`` with the updates."""


class LimitsConfig(Section):
    """Limits on how small and how frequent a run's questions may be; an order beyond them is refused.

    The server is told the two sizes, and gives the silo no smaller order if that is less than an average silo does.
    """

    batch_size: Annotated[int, Field(ge=1)] = 1
    """Smallest batch of an order [samples]. The default is no limit: what leaves a silo is a sum over a whole order,
    and balancers give slow silos batches of any size."""

    samples: Annotated[int, Field(ge=1)] = 8
    """Smallest number of samples that an order may process, planned and done. An order that is told to end sooner goes
    on until then. From an update of a single sample, that sample can be computed; the default is less than what
    balanced orders of several steps come to."""

    orders_per_hour: Annotated[int, Field(ge=1)] = 36_000
    """Most orders within any hour, over all runs and restarts. The default is ten a second, twice that of a run with a
    round each 0.2 s."""

    evaluations_per_hour: Annotated[int, Field(ge=1)] = 36_000
    """Most evaluations within any hour, likewise, alone or before an order."""

    statistics: Annotated[int, Field(ge=1)] = 5
    """Smallest count of cells that statistics of columns may tell, and that a column may be standardised by
    (``task.statistics.least``), at least."""

    surveys_per_hour: Annotated[int, Field(ge=1)] = 24
    """Most orders within any hour that ask what the columns of the silo's table hold, likewise; two or three make one
    survey. From two surveys with other silos in them the sums of those that differ can be worked out, by whoever reads
    both."""


class AuditConfig(Section):
    """The log of who asked what of the silo, and what left it; ``fedsync silo audit`` verifies it."""

    head_to: str | None = None
    """Folder on another machine, such as a mounted share, where the signed head of the log is written once a day: a
    log that somebody writes anew here does not fit it."""

    required: bool = False
    """Whether nothing leaves the silo as long as the head cannot be written there."""

    bytes: Annotated[int, Field(ge=100_000)] = 10_000_000
    """Size at which a file of the log is followed by another [bytes]; the chain goes on."""

    keep: Annotated[int, Field(ge=2)] = 1000
    """Files that are kept; of more, the oldest go, and the log says so."""

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if self.required and self.head_to is None:
            raise ValueError("required: true, but no place is named; name a folder as head_to")
        return self


_Data = Annotated[
    Annotated[list[str], Tag("~folders")] | Annotated[dict[str, str], Tag("~names")],
    Discriminator(lambda given: "~names" if isinstance(given, Mapping) else "~folders"),
]


class SiloStartConfig(Section):
    """What ``fedsync silo start`` is told. Paths are relative to the file."""

    name: Annotated[str, Field(pattern=SILO_NAME)]
    """Name of the silo; its node key is registered under it."""

    server: Annotated[str, Field(pattern=ADDRESS)]
    """Address of the SuperLink, ``host:port``; the server's certificate has to cover the host."""

    proxy: Annotated[str, Field(min_length=1)] | None = None
    """HTTP proxy on the way to the server, ``http://host:port``, which has to pass TLS on as it is (``CONNECT``), or
    ``direct`` for none. Left out, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY`` of the environment say."""

    hub_hosts: list[str] = Field(default_factory=list)
    """Hosts at which the hub of a run may be: the server names one when a run begins. Left out, only the server's own
    host."""

    authority: str | None = None
    """Certificate of the federation's authority, ``ca.crt``."""

    node_key: str | None = None
    """Private half of the silo's node key, ``NAME.node``."""

    insecure: bool = False
    """No TLS and no node key, for a trial on one machine."""

    state: str
    """Folder of the silo, which only its owner can enter: trainers, logs, health."""

    keys: str | None = None
    """Folder of the silo's keys for encrypted runs; with it, no update is sent in the clear."""

    passphrase_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "FEDSYNC_PASSPHRASE"
    """Environment variable that has the passphrase of the keys, where they are under one (``fedsync keys encrypt``)."""

    seal: SealConfig | None = None
    """What runs must at least seal; left out, all of every update, with any suite."""

    first_model: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """What ``fedsync silo digest`` prints of the model that an encrypted run may begin with. Left out, runs begin with
    the task's own, made from the seed."""

    code: Literal["installed", "reviewed", "shipped"] = "installed"
    """Code that may reach keys and data. ``installed``: FedSync's own as it is installed here; the client that a run
    brings along is confined, and runs name files among ``code_files``. ``reviewed``: the same, but runs name files of
    folders that one of ``reviewers`` signed (``fedsync code sign``), as they were signed. ``shipped``: also the client
    of any Flower app that the server sends, with all rights of the silo's user, so that the server can read the keys
    and whatever else that user can."""

    code_files: list[str] = Field(default_factory=list)
    """Python files below ``data`` that a run may have this silo run: ``task.py``, with the files beside it; and
    ``client.py:Net`` for what a run may call in one by its name (``task.model``). Left out, runs run no file."""

    reviewers: list[str] = Field(default_factory=list)
    """Public keys of reviewers, for ``code: reviewed``: lines such as ``ssh-ed25519 AAAA... alice``, which ``ssh-keygen
    -t ed25519`` writes into a file ``.pub``."""

    data: _Data = Field(default_factory=list)
    """Data that runs may read. A list of folders: the files that a run names lie below them. Or names with a file or
    folder each, as in ``{train: /srv/fl/train.csv}``: a run asks for ``data:train``. Left out, runs read no file. Keys,
    certificates, state and this file stay closed wherever they lie."""

    approve: Literal["never", "ask"] = "never"
    """Whether the owner wants to be asked about each run (``ask``) before the silo takes part. It waits for ``fedsync
    silo approve``, and a run whose specification is another waits anew."""

    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """How small and how frequent orders may be."""

    statistics: Literal["sealed", "plain"] = "sealed"
    """What a run may ask of the columns of the silo's table (``task.standardise: federated`` and ``task.statistics``).
    ``sealed``: its sums go into sums of several silos, which silos alone can open. ``plain``: in a run in the clear,
    the server may read the silo's own."""

    emulate: bool = False
    """Whether runs may have the silo pretend to be another machine, under that machine's name."""

    share_local: bool = False
    """Whether the model that this silo trains alone may go to the server, and to other silos, which evaluate it
    (``evaluation.cross_site``). In the clear only: under encryption no silo's own model travels."""

    errors: Literal["codes", "text"] = "codes"
    """What the server is told of a failure at this silo: one word of a closed list (``codes``), or in runs in the clear
    also the error's ``text``, which may hold paths and values of the data. A silo with keys sends words only."""

    index: Annotated[int, Field(ge=0)] = 0
    """Which share of the data it has, from 0 on, where the task splits data."""

    device: Annotated[str, Field(pattern=r"^[a-z]+(:[0-9]+)?$")] | None = None
    """Where to train, such as ``cuda:1``; left out, as the run says."""

    processes: Annotated[int, Field(ge=1, le=64)] | None = None
    """In how many processes FedSync's own loop trains, each on a GPU of its own from ``device`` on if there are GPUs;
    left out, as the run says."""

    presence: PresenceConfig | None = None
    """When the silo is there, each day. Outside of it, it takes no orders, its processes end, and it comes back by
    itself. Left out, it is always there."""

    resources: bool = True
    """Whether to tell the server how much of the machine is left to the trainer."""

    declared_speed: Annotated[float, Field(gt=0)] | None = None
    """Samples per second, which runs with ``balancer.speeds: declared`` go by; others measure it [samples/s]."""

    state_bytes: Annotated[int, Field(ge=1_000_000)] = 20_000_000_000
    """How much old trainers may leave on the disk; the oldest go first [bytes]."""

    logs: LogsConfig = Field(default_factory=LogsConfig)
    """How much of the logs is kept."""

    audit: AuditConfig = Field(default_factory=AuditConfig)
    """The silo's audit log."""

    _file: Path | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _secure(self) -> Self:
        if not self.insecure and (self.authority is None or self.node_key is None):
            missing = "authority" if self.authority is None else "node_key"
            raise ValueError(
                f"{missing} is missing; name ca.crt as authority and the file of `fedsync certs silo` as node_key, or "
                "write insecure: true for a trial on one machine"
            )
        if self.insecure and (self.authority or self.node_key):
            raise ValueError("insecure: true leaves out TLS, but authority or node_key is given; remove one of the two")
        if self.insecure and self.proxy not in (None, DIRECT):
            raise ValueError("insecure: true goes through no proxy, but proxy is given; remove one of the two")
        if self.proxy not in (None, DIRECT):
            Proxy.parse(str(self.proxy), "silo.yaml, proxy")
        if (self.code == "reviewed") != bool(self.reviewers):
            raise ValueError("code: reviewed and reviewers go together; write both, or neither")
        for key in self.reviewers:
            _check_reviewer(key)
        if self.seal is not None and self.keys is None:
            raise ValueError("seal is given, but no keys; name the folder of `fedsync keys` as keys, or remove seal")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a silo's file, make its paths absolute, and see that what it names is there.

        Raises:
            ConfigError: anything is wrong; names the place and the remedy.
        """
        file = YamlFile.read(path)
        config = absolute(file.validate(cls), path, ("authority", "node_key", "state", "keys"))
        must_exist(file, config, {"authority": "`fedsync certs init` makes it, at the server"})
        must_exist(
            file, config, {"node_key": "Make it with `fedsync certs silo`", "keys": "Make it with `fedsync keys`"}
        )
        audit = absolute(config.audit, path, ("head_to",))
        config = config.model_copy(update={"audit": audit})._with_data_beside(file, path)
        config._file = path.resolve()
        length = len(os.fsencode(config.state))
        if length > LONGEST_STATE:
            problem = f"{config.state} has {length} bytes, at most {LONGEST_STATE}"
            raise ConfigError(file.place(("state",)), problem, "Choose a shorter path: sockets live below it")
        return config

    @property
    def trusted_hosts(self) -> list[str]:
        """Hosts at which the hub of a run may be."""
        return self.hub_hosts or [self.server.rpartition(":")[0].strip("[]")]

    @property
    def paths(self) -> list[str]:
        """Folders and files that runs may read."""
        return list(self.data.values()) if isinstance(self.data, dict) else self.data

    def closed(self) -> list[str]:
        """Files and folders that no run may read, wherever ``data`` leads: state, keys, certificates and this file.

        The folders of certificate and node key are closed, too, unless data lie in them.
        """
        files = [Path(name) for name in (self.authority, self.node_key) if name is not None]
        beside_them = [
            file.parent for file in files if not any(Path(each).is_relative_to(file.parent) for each in self.paths)
        ]
        own = [Path(name) for name in (self.state, self.keys, self._file) if name is not None]
        return sorted({str(path) for path in (*own, *files, *beside_them)})

    def _with_data_beside(self, file: YamlFile, path: Path) -> Self:
        named = isinstance(self.data, dict)
        found = {}
        for key, name in self.data.items() if isinstance(self.data, dict) else enumerate(self.data):
            place = file.place(("data", str(key)))
            here = found[key] = beside(path, name, place)
            if not (here.is_dir() or (named and here.is_file())):
                wanted = "file or folder" if named else "folder"
                raise ConfigError(place, f"{here} is no {wanted}", "Make it, or remove it here")
            for closed in (self.state, self.keys):
                if closed is not None and here.is_relative_to(closed):
                    raise ConfigError(place, f"{here} lies in {closed}", "Keep data apart from keys and state")
        paths = {key: str(here) for key, here in found.items()}
        code = []
        for index, text in enumerate(self.code_files):
            place, (name, colon, call) = file.place(("code_files", str(index))), text.partition(":")
            here = beside(path, name, place).resolve()
            if not here.is_file():
                raise ConfigError(place, f"there is no file {here}", "Name a Python file below data")
            code.append(f"{here}{colon}{call}")
        return self.model_copy(update={"data": paths if named else list(paths.values()), "code_files": code})


def _check_reviewer(key: str) -> None:
    """Raises ValueError: it is no public key of a reviewer."""
    from fedsync.common.sandbox.code_review import bare

    try:
        bare(key)
    except ValueError as error:
        raise ValueError(f"reviewers has {key[:40]!r}; write a line as ssh-ed25519 AAAA..., of a file .pub") from error


def absolute(config: Model, path: Path, fields: Sequence[str]) -> Model:
    """The section with its paths resolved beside the file ``path``.

    Raises:
        ConfigError: one is no path.
    """
    found = {field: getattr(config, field) for field in fields}
    return config.model_copy(
        update={field: str(beside(path, name, f"{path}, {field}")) for field, name in found.items() if name}
    )


def must_exist(file: YamlFile, config: Section, remedies: dict[str, str]) -> None:
    """Check that the paths of the fields, where they are given, lead somewhere.

    Raises:
        ConfigError: one does not; with the remedy of the field.
    """
    for field, remedy in remedies.items():
        name = getattr(config, field)
        if name and not Path(name).exists():
            raise ConfigError(file.place((field,)), f"{name} does not exist", remedy)
