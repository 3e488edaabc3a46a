"""Code that changes after a silo's owner approved a run, or after a reviewer signed it; the gain is what it writes."""

import importlib
import importlib.util
import os
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox import named_code
from fedsync.common.sandbox.confirmed_code import REVIEW, Review, code_below, confirm_imports, confirmed_by_approval
from fedsync.ops.approval_summary import code_of
from fedsync.silo.owner.approvals import APPROVALS, Approvals, with_code
from fedsync.silo.protocol import Describe, Refused
from tests.attacks.adversary import Federation
from tests.attacks.conftest import Make

APP = "from pathlib import Path\nfrom fedsync.client.app import SiloApp\nimport {beside}\napp = SiloApp()\n"
HARMLESS = "value = 1\n"
HARM = f"from pathlib import Path\nPath(__file__).with_name('done').touch()\n{HARMLESS}"
ALICE, MALLORY = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with an app that imports a module and a package beside it, under names that no other test has."""
    folder = tmp_path / "code"
    (folder / "confirmed_package").mkdir(parents=True)
    (folder / "confirmed_package" / "__init__.py").write_text("from confirmed_package import inner\n")
    (folder / "confirmed_package" / "inner.py").write_text(HARMLESS)
    (folder / "confirmed_beside.py").write_text(HARMLESS)
    (folder / "app.py").write_text(APP.format(beside="confirmed_beside, confirmed_package"))
    return folder


def exchanges(folder: Path) -> dict[str, Path]:
    """Every file that the app runs, and others that Python would take in the place of one."""
    return {
        "app": folder / "app.py",
        "beside": folder / "confirmed_beside.py",
        "package": folder / "confirmed_package" / "__init__.py",
        "inner": folder / "confirmed_package" / "inner.py",
    }


def ask(federation: Federation, folder: Path, **owner: Any) -> Any:
    spec = federation.spec("code", task={"kind": "silo-app", "file": str(folder / "app.py")})
    owner = {"data": [str(folder), str(federation.root / "data")], **owner}
    try:
        return federation.silo("silo-a", spec, **owner).ask(Describe()).reply
    finally:
        named_code._neighbours._leave()  # a silo's process goes on with its checks; other tests do not
        for name in [name for name in sys.modules if name.startswith("confirmed_")]:
            del sys.modules[name]


def approve(federation: Federation, code: Path, **owner: Any) -> None:
    """The owner says yes to all that waits, with its code as it is."""
    ask(federation, code, approve="ask", **owner)
    folder = federation.folder / "state" / "silo-a" / APPROVALS
    config = federation.config("silo-a", approve="ask", data=[str(code), str(federation.root / "data")], **owner)
    (run,) = Approvals(folder).waiting()
    found = code_of(run, config)
    assert len(found) == len(list(code.rglob("*.py")))
    Approvals(folder).decide(with_code(run.digest, found), approve=True, code=found)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["approved", "signed"])
@pytest.mark.parametrize("name", ["app", "beside", "package", "inner"])
def test_code_changed_after_its_approval_or_signature_does_not_run(make: Make, code: Path, name: str, how: str) -> None:
    federation, owner = make(owner={"approve": "never"}), reviewed()
    if how == "approved":
        owner = {"code_files": [str(code / "app.py")]}
        approve(federation, code, **owner)
        owner["approve"] = "ask"
    else:
        Review(code_below(code), {}).sign(ALICE).write(code)
    exchanges(code)[name].write_text(HARM if name != "app" else HARM + APP.format(beside="json"))
    assert isinstance(ask(federation, code, **owner), Refused)
    assert not list(code.rglob("done"))


def test_approved_code_runs_while_it_is_as_it_was(make: Make, code: Path) -> None:
    federation, owner = make(owner={"approve": "never"}), {"code_files": [str(code / "app.py")]}
    (code / "confirmed_package" / "inner.py").write_text(HARM)
    approve(federation, code, **owner)
    ask(federation, code, approve="ask", **owner)
    assert list(code.rglob("done")), "what an approved run imports runs"


def reviewed(key: Ed25519PrivateKey = ALICE) -> dict[str, Any]:
    return {"code": "reviewed", "reviewers": [f"{public(key)} alice@hospital"]}


UNSIGNED: dict[str, Callable[[Review], Review | None]] = {
    "none": lambda signed: None,
    "no signature": lambda signed: Review(signed.files, {}),
    "of somebody else": lambda signed: Review(signed.files, {}).sign(MALLORY),
    "of other files": lambda signed: Review(
        signed.files, Review({**signed.files, "app.py": "0" * 64}, {}).sign(ALICE).signatures
    ),
    "under the reviewer's key": lambda signed: Review(signed.files, {public(ALICE): MALLORY.sign(b"any")}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNSIGNED)
def test_code_that_no_listed_reviewer_signed_does_not_run(make: Make, code: Path, kind: str) -> None:
    (code / "confirmed_package" / "inner.py").write_text(HARM)
    review = UNSIGNED[kind](Review(code_below(code), {}).sign(ALICE))
    if review is not None:
        review.write(code)
    assert isinstance(ask(make(), code, **reviewed()), Refused)
    assert not list(code.rglob("done"))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"files": [], "signatures": {}}', '{"files": {"a": 1}, "signatures": {}}']
)
def test_a_damaged_review_is_a_refusal(make: Make, code: Path, text: str) -> None:
    (code / REVIEW).write_text(text)
    assert isinstance(ask(make(), code, **reviewed()), Refused)


def test_a_file_that_comes_later_is_not_imported(make: Make, code: Path) -> None:
    """A module that only the attacker wrote, bytecode and a native module in the place of one that was signed."""
    (code / "app.py").write_text(APP.format(beside="confirmed_later"))
    Review(code_below(code), {}).sign(ALICE).write(code)
    for name in ("confirmed_later.py", "confirmed_later.pyc", "confirmed_later.so"):
        (code / name).write_text(HARM)
        assert isinstance(ask(make(), code, **reviewed()), Refused)
        assert not list(code.rglob("done"))
        (code / name).unlink()


@pytest.mark.parametrize("ending", [".pyc", "/__init__.pyc"])
def test_nothing_but_source_is_imported_from_a_package(make: Make, code: Path, ending: str) -> None:
    """Bytecode in the place of a signed module's source that is gone, which Python would take."""
    Review(code_below(code), {}).sign(ALICE).write(code)
    inner = code / "confirmed_package" / "inner.py"
    inner.write_text(HARM)
    compiled = Path(f"{inner.with_suffix('')}{ending}")
    compiled.parent.mkdir(exist_ok=True)
    py_compile.compile(str(inner), str(compiled))
    inner.unlink()
    assert isinstance(ask(make(), code, **reviewed()), Refused)
    assert not list(code.rglob("done"))


@pytest.mark.parametrize("place", ["code/libs", "elsewhere", "elsewhere.zip"])
def test_code_on_a_path_of_the_apps_own_is_confirmed_too(make: Make, code: Path, place: str) -> None:
    libs = code.parent / place
    app = code / "app.py"
    app.write_text(f"import sys\nsys.path.insert(0, {str(libs)!r})\n" + APP.format(beside="confirmed_lib"))
    Review(code_below(code), {}).sign(ALICE).write(code)
    marked = f"from pathlib import Path\nPath({str(code)!r}, 'done').touch()\n"
    if place.endswith(".zip"):
        with ZipFile(libs, "w") as archive:
            archive.writestr("confirmed_lib.py", marked)
    else:
        libs.mkdir()
        (libs / "confirmed_lib.py").write_text(marked)
    try:
        assert isinstance(ask(make(), code, **reviewed()), Refused)
        assert not list(code.rglob("done"))
        if place == "code/libs":
            Review(code_below(code), {}).sign(ALICE).write(code)
            ask(make(), code, **reviewed())
            assert list(code.rglob("done")), "signed code runs, wherever it lies below the folder"
    finally:
        sys.path[:] = [each for each in sys.path if each != str(libs)]


def test_a_package_without_an_init_file_is_imported(make: Make, code: Path) -> None:
    (code / "confirmed_spaces").mkdir()
    (code / "confirmed_spaces" / "inner.py").write_text(HARM)
    (code / "app.py").write_text(APP.format(beside="confirmed_spaces.inner"))
    Review(code_below(code), {}).sign(ALICE).write(code)
    ask(make(), code, **reviewed())
    assert list(code.rglob("done"))
    (code / "confirmed_spaces" / "done").unlink()
    (code / "confirmed_spaces" / "inner.py").write_text(f"{HARM}\n")
    assert isinstance(ask(make(), code, **reviewed()), Refused)
    assert not list(code.rglob("done"))


def test_what_is_installed_is_not_asked_about(make: Make, code: Path) -> None:
    """Also where a process has a folder of libraries below the code, as a virtual environment beside it is."""
    check = confirmed_by_approval(code / "none")
    back = confirm_imports(Path(sys.prefix).parent, check)
    try:
        sys.modules.pop("colorsys", None)
        assert importlib.import_module("colorsys") and importlib.util.find_spec("no_such_module_anywhere") is None
    finally:
        back()


def test_a_pipe_among_the_code_is_named_and_nobody_waits_for_it(code: Path) -> None:
    os.mkfifo(code / "pipe.py")
    with pytest.raises(ConfigError, match=r"pipe\.py.*no file"):
        code_below(code)
