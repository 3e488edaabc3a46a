"""Code that changes after a silo's owner approved a run, or after a reviewer signed it; the gain is what it writes."""

import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedsync.common.code_review import REVIEW, Review, code_below
from fedsync.ops.approval_summary import code_of
from fedsync.trainer.approvals import APPROVALS, Approvals, with_code
from fedsync.trainer.protocol import Describe, Refused
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


@pytest.mark.parametrize("name", ["app", "beside", "package", "inner"])
def test_code_that_changes_after_the_approval_does_not_run(make: Make, code: Path, name: str) -> None:
    federation, owner = make(owner={"approve": "never"}), {"code_files": [str(code / "app.py")]}
    approve(federation, code, **owner)
    exchanges(code)[name].write_text(HARM if name != "app" else HARM + APP.format(beside="json"))
    assert isinstance(ask(federation, code, approve="ask", **owner), Refused)
    assert not list(code.rglob("done"))


def test_approved_code_runs_while_it_is_as_it_was(make: Make, code: Path) -> None:
    federation, owner = make(owner={"approve": "never"}), {"code_files": [str(code / "app.py")]}
    (code / "confirmed_package" / "inner.py").write_text(HARM)
    approve(federation, code, **owner)
    ask(federation, code, approve="ask", **owner)
    assert list(code.rglob("done")), "what an approved run imports runs"


def reviewed(key: Ed25519PrivateKey = ALICE) -> dict[str, Any]:
    return {"code": "reviewed", "reviewers": [f"{public(key)} alice@hospital"]}


def test_signed_code_runs_without_being_listed(make: Make, code: Path) -> None:
    (code / "confirmed_package" / "inner.py").write_text(HARM)
    Review(code_below(code), {}).sign(ALICE).write(code)
    ask(make(), code, **reviewed())
    assert list(code.rglob("done"))


@pytest.mark.parametrize("name", ["app", "beside", "package", "inner"])
def test_signed_code_that_changes_does_not_run(make: Make, code: Path, name: str) -> None:
    Review(code_below(code), {}).sign(ALICE).write(code)
    exchanges(code)[name].write_text(HARM if name != "app" else HARM + APP.format(beside="json"))
    assert isinstance(ask(make(), code, **reviewed()), Refused)
    assert not list(code.rglob("done"))


def forged(code: Path) -> dict[str, Review | None]:
    signed = Review(code_below(code), {}).sign(ALICE)
    other = Review({**signed.files, "app.py": "0" * 64}, {}).sign(ALICE)
    return {
        "none": None,
        "no-signature": Review(signed.files, {}),
        "of-somebody-else": Review(signed.files, {}).sign(MALLORY),
        "of-other-files": Review(signed.files, other.signatures),
        "under-the-reviewers-key": Review(signed.files, {public(ALICE): MALLORY.sign(b"any")}),
    }


@pytest.mark.parametrize(
    "kind", ["none", "no-signature", "of-somebody-else", "of-other-files", "under-the-reviewers-key"]
)
def test_code_that_no_listed_reviewer_signed_does_not_run(make: Make, code: Path, kind: str) -> None:
    (code / "confirmed_package" / "inner.py").write_text(HARM)
    review = forged(code)[kind]
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
