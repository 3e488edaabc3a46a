"""Which tensors travel, stay or are frozen: by what is trained, and by what the run and the silo's code say."""

import pytest

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.model.layout import Layout
from fedsync.model.tensor_parts import UNSAID, CommonForm, ModelForm, PartPatterns, Parts, TensorFacts, divide

# A body without gradient, an adapter, a norm with a buffer, and a head whose weight is the embedding's.
MODEL = {
    "embed.weight": TensorFacts(1),
    "body.weight": TensorFacts(2, trained=False),
    "adapter.down": TensorFacts(3),
    "norm.weight": TensorFacts(4),
    "norm.running_mean": TensorFacts(5),
    "head.weight": TensorFacts(1),
    "head.bias": TensorFacts(6),
}
REST = ("embed.weight", "adapter.down", "norm.weight", "norm.running_mean", "head.weight", "head.bias")


def said(share: list[str] | None = None, private: tuple[str, ...] = ()) -> PartPatterns:
    return PartPatterns(share, private)


@pytest.mark.parametrize(
    ("run", "own", "expected"),
    [
        (UNSAID, UNSAID, Parts(REST, (), ("body.weight",))),
        (said(private=("norm.*",)), UNSAID, Parts(REST[:2] + REST[4:], REST[2:4], ("body.weight",))),
        (said(private=("norm.*",)), said(private=("head.bias",)),
         Parts(("embed.weight", "adapter.down", "head.weight"), ("norm.weight", "norm.running_mean", "head.bias"),
               ("body.weight",))),
        # A list names all that travels, also what is not trained.
        (said(["adapter.*", "body.*"]), UNSAID,
         Parts(("body.weight", "adapter.down"), (), ("embed.weight", *REST[2:]))),
        # The run shares less than the code does.
        (said(["adapter.*"]), said(["adapter.*", "norm.*"]),
         Parts(("adapter.down",), (), ("embed.weight", "body.weight", *REST[2:]))),
        (said(["adapter.*"], ("norm.*",)), UNSAID,
         Parts(("adapter.down",), REST[2:4], ("embed.weight", "body.weight", *REST[4:]))),
    ],
)  # fmt: skip
def test_parts(run: PartPatterns, own: PartPatterns, expected: Parts) -> None:
    assert divide(MODEL, run, own) == expected


@pytest.mark.parametrize(
    ("run", "own", "problem"),
    [
        (said(["adaptor.*"]), UNSAID, r"model: no tensor's name matches 'adaptor\.\*'\. Names are embed.weight, body"),
        (UNSAID, said(private=("norms",)), r"task, parts\(\): no tensor's name matches 'norms'"),
        (said(["*"], ("norm.*",)), UNSAID, "norm.weight is shared by model, and private by model"),
        (said(["head.*", "embed.*"]), said(private=("head.bias",)),
         r"task, parts\(\): head.bias is shared by model, and private by task"),
        (said(["*"]), said(["adapter.*"]), r"embed.weight is in share, and the silo's own code shares adapter.\* only"),
        (said(private=("head.*",)), UNSAID, "head.weight is tied to embed.weight: one is private, the other shared"),
        (said(["head.*"]), UNSAID, "head.weight is tied to embed.weight: one is shared, the other frozen"),
        (said(private=("[a-g]*", "[h-z]*")), UNSAID, "no tensor is left to send: 7 tensors are private, 0 frozen"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_with_names(run: PartPatterns, own: PartPatterns, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        divide(MODEL, run, own)


def test_one_pattern_may_be_a_text() -> None:
    assert PartPatterns("adapter.*", "norm.*").all == ("adapter.*", "norm.*")  # type: ignore[arg-type]


LAYOUT = Layout(("a", "b"), ((2,), (3, 1)))
OTHERS = [
    Layout(("b", "a"), ((2,), (3, 1))),
    Layout(("a", "b"), ((3, 1), (2,))),
    Layout(("a", "b", "c"), ((2,), (3, 1), (0,))),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_silo_whose_layout_is_another_is_refused_though_its_length_be_the_same(other: Layout) -> None:
    assert other.size == LAYOUT.size
    form = CommonForm(LAYOUT, "")
    form.check("a", ModelForm.of(LAYOUT))
    with pytest.raises(ProtocolError, match=r"'b' failed the check 'model': .*other names or shapes.*same code"):
        form.check("b", ModelForm.of(other))
    with pytest.raises(ProtocolError, match="other names or shapes"):
        form.check("b", None)


@pytest.mark.parametrize("known", ["11" * 32, None])
def test_the_first_models_frozen_tensors_count_else_those_of_the_first_silo(known: str | None) -> None:
    form = CommonForm(LAYOUT, known)
    form.check("a", ModelForm.of(LAYOUT, "11" * 32))
    with pytest.raises(ProtocolError, match=r"'b' failed.*\('22222222'\.\.\.\) are not those \('11111111'.*same file"):
        form.check("b", ModelForm.of(LAYOUT, "22" * 32))
    with pytest.raises(ProtocolError, match=r"\(none\) are not those"):
        form.check("c", ModelForm.of(LAYOUT))
    form.check("d", ModelForm.of(LAYOUT, "11" * 32))
    assert form.frozen == "11" * 32
