"""The registry of models: known names, refused ones, and the messages."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.config import validate
from headrace.errors import SpecError
from headrace.trainer.config import ModelSection
from headrace.trainer.models.contract import Inputs, SequenceInput, Shape, SlotShape
from headrace.trainer.models.layers import mean_over_sequence, pairwise_sum, sequence_vector
from headrace.trainer.models.module_checks import check_outputs
from headrace.trainer.models.registry import MODELS, check_section, load_model
from tests.fakes.model_settings import MODEL_NAMES, fitting

ROOT = Path(__file__).resolve().parents[2]
SHAPE = Shape((SlotShape("s", 4, True),), (), (("d", 2),), ("ctr",))
WHOLE = Shape((SlotShape("s", 4, True),), (SlotShape("q", 4, True, 3),), (("d", 2),), ("ctr", "ctcvr"))


def section(**values):
    return ModelSection.model_validate(values)


def write(folder, name, text):
    (folder / f"{name}.py").write_text("from torch import nn\n" + text)


def refused(folder, path, **values):
    with pytest.raises(SpecError) as caught:
        load_model(section(**{"class": path} | values), SHAPE, folder)
    return str(caught.value)


def test_a_spec_is_checked_without_torch():
    code = (
        "import sys; from headrace.trainer.config import ModelSection;"
        "from headrace.trainer.models.registry import check_section;"
        "from headrace.trainer.models.contract import Shape, SlotShape;"
        "check_section(ModelSection(name='dcn_v2'), Shape((SlotShape('s', 4, True),), (), (), ('ctr',)));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_model_takes_the_settings_that_are_checked():
    for name in MODEL_NAMES:
        given = section(name=name, settings=fitting(name, WHOLE))
        check_section(given, WHOLE)
        assert isinstance(load_model(given, WHOLE, Path(".")), nn.Module)


def test_the_error_for_an_unknown_name_names_the_nearest():
    for act in (lambda s: check_section(s, SHAPE), lambda s: load_model(s, SHAPE, Path("."))):
        with pytest.raises(SpecError, match="model.name: no model 'dcnv2'; did you mean 'dcn_v2'.*lr, fm"):
            act(section(name="dcnv2"))


def test_a_wrong_setting_is_named():
    with pytest.raises(SpecError, match="model.settings.hiden: unknown key; did you mean 'hidden'"):
        check_section(section(name="deepfm", settings={"hiden": [64]}), SHAPE)
    with pytest.raises(SpecError, match=r"model.settings.hidden.1: .*greater than or equal to 1.*\(got 0\)"):
        check_section(section(name="deepfm", settings={"hidden": [64, 0]}), SHAPE)
    with pytest.raises(SpecError, match="model.settings.hidden: unknown key"):
        check_section(section(name="lr", settings={"hidden": [64]}), SHAPE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "din"}, "model.settings.target: din needs the slot of the item that is judged"),
        ({"name": "din", "target": "nope"}, "target: 'nope' is not a sparse slot with pooling; there are: 's'"),
        ({"name": "din", "target": "s", "sequence": "s"}, "sequence: 's' is not a slot with pooling = \"none\""),
        ({"name": "sasrec", "target": "s", "attention_heads": 3}, "attention_heads: 3 does not divide 4"),
        ({"name": "two_tower"}, "model.settings.item: two_tower needs the slots of the item"),
        ({"name": "two_tower", "item": ["d", "s"]}, "item: 'd' is not a sparse slot with pooling"),
        ({"name": "two_tower", "item": ["s", "x"]}, "item: 'x' is no sparse or dense slot; there are: s, q, d"),
        ({"name": "two_tower", "item": ["s", "q", "d"]}, "slots: two_tower needs slots of the user"),
        ({"name": "skip_gram"}, "model.settings.context: skip_gram needs the slot of a word near the word"),
        ({"name": "skip_gram", "context": "q"}, "context: 'q' is not a sparse slot with pooling; there are: 's'"),
        ({"name": "skip_gram", "context": "s"}, "slots: skip_gram reads no dense values: remove slot 'd'"),
        ({"name": "finalmlp", "first_context": "x"}, "first_context: 'x' is no sparse or dense slot"),
        ({"name": "finalmlp", "gates": False, "first_context": "s"}, "first_context: it is of no use"),
        ({"name": "finalmlp", "bilinear_heads": 3}, "bilinear_heads: 3 does not divide 64"),
    ],
)
def test_settings_that_name_slots_say_what_is_wrong(settings, words):
    given = {key: value for key, value in settings.items() if key != "name"}
    with pytest.raises(SpecError) as caught:
        check_section(section(name=settings["name"], settings=given), WHOLE)
    assert words in str(caught.value)


def test_esmm_needs_two_tasks():
    with pytest.raises(SpecError, match="model.name: esmm needs two tasks"):
        check_section(section(name="esmm"), SHAPE)


def test_sasrec_asks_which_of_several_sequences():
    two = Shape(WHOLE.pooled, (*WHOLE.sequences, SlotShape("r", 4, True, 3)), (), ("ctr",))
    with pytest.raises(SpecError, match="sequence: sasrec reads one sequence: name it, as 'q', 'r' are there"):
        check_section(section(name="sasrec", settings={"target": "s"}), two)


def test_slots_that_do_not_fit_are_named():
    two = Shape((SlotShape("a", 8, True), SlotShape("b", 16, False)), (), (), ("ctr",))
    for name, words in {
        "fm": "first_order = true",
        "deepfm": "slot 'a' has dim 8, slot 'b' 16",
        "dlrm": "slot 'a' has dim 8, slot 'b' 16",
        "lr": "'b' have none; set first_order = true",
    }.items():
        with pytest.raises(SpecError, match=words):
            load_model(section(name=name), two, Path("."))


ODD_SHAPES = {
    "nothing": Shape((), (), (), ("ctr",)),
    "dense only": Shape((), (), (("d", 2),), ("ctr",)),
    "no vectors": Shape((SlotShape("a", 0, True),), (), (), ("ctr",)),
    "no vectors beside dense": Shape((SlotShape("a", 0, True),), (), (("d", 2),), ("ctr",)),
    "two lengths": Shape((SlotShape("a", 8, True), SlotShape("b", 16, True)), (), (), ("ctr",)),
    "no first order": Shape((SlotShape("a", 8, False),), (SlotShape("b", 8, True, 3),), (), ("ctr", "cvr")),
    "a sequence alone": Shape((), (SlotShape("b", 8, True, 3),), (), ("ctr",)),
    "a sequence of another length": Shape(
        (SlotShape("a", 8, True),), (SlotShape("b", 4, True, 3),), (), ("ctr", "ctcvr")
    ),
    "a sequence without vectors": Shape((SlotShape("a", 8, True),), (SlotShape("b", 0, True, 3),), (), ("ctr",)),
}


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("odd", ODD_SHAPES)
def test_the_check_refuses_by_a_key_the_shapes_that_cannot_be_built(name, odd):
    shape = ODD_SHAPES[odd]
    settings = validate(MODELS.load(name), fitting(name, shape))
    try:
        settings.check(shape, name)
    except SpecError as error:
        assert name in str(error) and (error.path in ("model.name", "slots") or error.path.startswith("model.settings"))
        with pytest.raises(SpecError):
            load_model(section(name=name, settings=fitting(name, shape)), shape, Path("."))
    else:
        settings.build(shape)


def test_a_users_model_is_imported_from_the_specs_folder(tmp_path):
    (tmp_path / "deep_package").mkdir()
    write(
        tmp_path / "deep_package",
        "own",
        "class Own(nn.Module):\n def __init__(self, shape, settings):\n"
        "  super().__init__(); self.got = shape, settings\n",
    )
    model = load_model(section(**{"class": "deep_package.own:Own", "settings": {"a": 1}}), SHAPE, tmp_path)
    assert model.got == (SHAPE, {"a": 1})


def test_each_mistake_in_a_users_model_has_its_own_message(tmp_path):
    write(tmp_path, "m_good", "class Model(nn.Module):\n pass\nclass Plain:\n pass\n")
    write(tmp_path, "m_needs", "import not_installed_anywhere\n")
    write(tmp_path, "m_torn", "def\n")
    write(tmp_path, "m_ctor", "class Model(nn.Module):\n def __init__(self, shape):\n  super().__init__()\n")
    write(tmp_path, "m_sett", "class Model(nn.Module):\n Settings = dict\n")
    write(
        tmp_path,
        "m_strict",
        "from headrace.config import Section\nclass Model(nn.Module):\n class Settings(Section):\n  width: int = 1\n"
        " def __init__(self, shape, settings):\n  super().__init__()\n",
    )
    assert "no module 'm_absent' in" in refused(tmp_path, "m_absent:Model")
    assert "no module 'm_absent' in" in refused(tmp_path, "m_absent.part:Model")
    assert "did you mean 'Model'" in refused(tmp_path, "m_good:Modell")
    assert "no torch.nn.Module" in refused(tmp_path, "m_good:Plain")
    assert "needs 'not_installed_anywhere'" in refused(tmp_path, "m_needs:Model")
    assert "cannot be imported" in refused(tmp_path, "m_torn:Model")
    assert "built as Class(shape, settings)" in refused(tmp_path, "m_ctor:Model")
    assert "no headrace.config.Section" in refused(tmp_path, "m_sett:Model")
    assert "model.settings.widht: unknown key; did you mean 'width'" in refused(
        tmp_path, "m_strict:Model", settings={"widht": 2}
    )
    assert "not of the form" in refused(tmp_path, "m_good.Model")
    with pytest.raises(SpecError, match="not of the form"):
        check_section(section(**{"class": "a b:C"}), SHAPE)


def test_outputs_that_break_the_contract_are_named():
    good = {"ctr": torch.zeros(3)}
    assert check_outputs(good, ("ctr",), 3) is good
    for outputs, words in (
        (torch.zeros(3), "returned a Tensor"),
        ({"cvr": torch.zeros(3)}, "no tensor for task 'ctr', but 'cvr'"),
        ({"ctr": torch.zeros(3, 1)}, r"shape \(3, 1\)"),
    ):
        with pytest.raises(SpecError, match=words):
            check_outputs(outputs, ("ctr",), 3)


class Baseline(nn.Module):
    """The dense part of the benchmark's plain model."""

    def __init__(self, width, hidden, num_dense):
        super().__init__()
        h = hidden
        self.deep = nn.Sequential(
            *(nn.Linear(width, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))
        )
        self.wide = nn.Linear(num_dense, 1)

    def forward(self, vectors_BFD, dense_BC):
        return (self.deep(torch.cat([vectors_BFD.flatten(1), dense_BC], 1)) + self.wide(dense_BC)).squeeze(1)


def test_wide_deep_is_the_benchmarks_model():
    slots = tuple(SlotShape(f"s{n}", 16, False) for n in range(26))
    shape = Shape(slots, (), (("d", 13),), ("ctr",))
    model = load_model(section(name="wide_deep", settings={"hidden": [8, 8, 8]}), shape, Path("."))
    plain = Baseline(26 * 16 + 13, 8, 13)
    assert sorted(p.numel() for p in model.parameters()) == sorted(p.numel() for p in plain.parameters())
    deep = [p for name, p in model.named_parameters() if not name.startswith("wide")]
    with torch.no_grad():
        for ours, theirs in zip([*deep, model.wide.dense_TC, model.wide.bias_T], plain.parameters(), strict=True):
            ours.copy_(theirs)
    vectors_BFD, dense_BC = torch.randn(5, 26, 16), torch.randn(5, 13)
    inputs = Inputs(
        {s.name: vectors_BFD[:, n] for n, s in enumerate(slots)}, vectors_BFD, torch.zeros(5, 0), {}, dense_BC
    )
    # Not bit for bit: the first layer is a sum over the parts of its input.
    assert torch.allclose(model(inputs)["ctr"], plain(vectors_BFD, dense_BC), atol=1e-6)


def test_pairs_are_summed_as_defined():
    fields_BFD = torch.randn(4, 5, 3)
    wanted = sum((fields_BFD[:, i] * fields_BFD[:, j]).sum(1, keepdim=True) for i in range(5) for j in range(i))
    torch.testing.assert_close(pairwise_sum(fields_BFD), wanted)


def test_an_empty_sequence_is_zeros_and_others_their_mean():
    vectors_BLD = torch.arange(12.0).reshape(2, 3, 2)
    mask_BL = torch.tensor([[True, True, False], [False, False, False]])
    mean_BD = mean_over_sequence(vectors_BLD, mask_BL)
    assert mean_BD.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert torch.equal(sequence_vector(SequenceInput(vectors_BLD, vectors_BLD[:, :, 0], mask_BL)), mean_BD)


@pytest.mark.parametrize(("name", "rank"), [("dcn_v2", None), ("dcn_v2", 2)])
def test_a_cross_layer_is_its_papers_formula(name, rank):
    settings = {"cross_layers": 1, "hidden": []} | ({} if rank is None else {"low_rank": rank})
    model = load_model(section(name=name, settings=settings), SHAPE, Path("."))
    layer, x_BW = model.cross[0], torch.randn(3, 6)
    if rank is None:
        wanted = x_BW * (x_BW @ layer.map.weight.T + layer.map.bias) + x_BW
    else:
        down, up = layer.map
        wanted = x_BW * (x_BW @ down.weight.T @ up.weight.T + up.bias) + x_BW
    torch.testing.assert_close(layer(x_BW, x_BW), wanted)


def test_a_class_that_extends_a_model_of_headrace_has_its_settings_and_checks(tmp_path):
    write(
        tmp_path, "mine_extended", "from headrace.trainer.models.fm import DeepFm\n\n\nclass Mine(DeepFm):\n    pass\n"
    )
    given = {"class": "mine_extended:Mine"}
    module = load_model(section(**given, settings={"hidden": [3]}), SHAPE, tmp_path)
    assert any(tuple(weight.shape)[0] == 3 for weight in module.parameters())
    assert "model.settings.hiden" in refused(tmp_path, "mine_extended:Mine", settings={"hiden": [3]})
    with pytest.raises(SpecError, match="Mine"):
        load_model(section(**given), Shape((), (), (), ("ctr",)), tmp_path)
