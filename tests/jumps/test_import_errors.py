"""A foreign lens that is malicious, damaged or of another model is refused in one line, and nothing of it runs."""

import contextlib
import io
import os
import pickle
import zipfile

import pytest
import torch
from helpers import foreign_lenses, synthetic_jumps
from helpers.foreign_lenses import TO_LAST, D, drawn, jacobian_content, tuned_folder

import layerjump as lj
from layerjump.errors import BadArtifact, BadForeignLens, UnsafePickle, WrongModel

model = foreign_lenses.model  # a fixture


class Evil:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.system, (f"touch {self.place}",)


def nested(place) -> bytes:
    """A pickle that names nothing but what tensors need, with another pickle where a tensor's numbers should be."""

    numbers = io.BytesIO()
    torch.save(Evil(place), numbers, _use_new_zipfile_serialization=False)

    class Storage:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (numbers.getvalue(),)

    return pickle.dumps(Storage())


@pytest.mark.parametrize("make", [lambda place: pickle.dumps(Evil(place)), nested])
def test_a_malicious_pickle_is_refused_and_nothing_runs(model, tmp_path, make):
    place = tmp_path / "ran"
    (tmp_path / "0_3.pickle").write_bytes(make(place))
    with pytest.raises(UnsafePickle, match="nothing of it was run"):
        lj.import_lens(tmp_path, model)
    assert not place.exists()
    pickle.loads(make(place))  # the trap works where nobody is careful
    assert place.exists()


def test_a_malicious_torch_file_is_refused_and_nothing_runs(model, tmp_path):
    place = tmp_path / "ran"
    torch.save(jacobian_content(metadata=Evil(place)), tmp_path / "lens.pt")
    with pytest.raises(UnsafePickle, match="system.*nothing of it was run"):
        lj.import_lens(tmp_path / "lens.pt", model)
    tuned_folder(tmp_path / "lens", model)
    torch.save({"0.weight": Evil(place)}, tmp_path / "lens" / "params.pt")
    with pytest.raises(UnsafePickle):
        lj.import_lens(tmp_path / "lens", model)
    assert not place.exists()


@pytest.mark.parametrize("name", ["builtins.eval", "builtins.getattr", "torch.load", "os.system"])
def test_no_other_name_is_looked_up(model, tmp_path, name):
    module, _, function = name.rpartition(".")
    (tmp_path / "0_3.pickle").write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(UnsafePickle, match=name):
        lj.import_lens(tmp_path, model)


def test_files_cut_short_anywhere_are_named_errors(model, tmp_path):
    tuned_folder(tmp_path / "lens", model)
    torch.save(jacobian_content(), tmp_path / "lens.pt")
    (tmp_path / "0_3.pickle").write_bytes(pickle.dumps(torch.randn(D, D)))
    whole = {
        tmp_path / "lens" / "params.pt": tmp_path / "lens",
        tmp_path / "lens" / "config.json": tmp_path / "lens",
        tmp_path / "lens.pt": tmp_path / "lens.pt",
        tmp_path / "0_3.pickle": tmp_path / "0_3.pickle",
    }
    for file, given in whole.items():
        content = file.read_bytes()
        for kept in (0, 1, 10, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:kept])
            with pytest.raises(BadArtifact) as caught:
                lj.import_lens(given, model)
            assert "\n" not in str(caught.value)
        file.write_bytes(content)
        lj.import_lens(given, model)


def test_damaged_bytes_never_escape_as_other_errors(model, tmp_path):
    content = bytearray(pickle.dumps(torch.randn(D, D)))
    for place in [*range(450), len(content) - 1, len(content) - 40]:
        damaged = content.copy()
        damaged[place] ^= 0xFF
        (tmp_path / "0_3.pickle").write_bytes(damaged)
        with contextlib.suppress(BadArtifact):
            lj.import_lens(tmp_path, model)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ([1, 2], BadForeignLens, "holds no Jacobian lens"),
        ({"J": {}}, BadForeignLens, "holds no Jacobian lens"),
        (jacobian_content(d_model=64), WrongModel, "d_model 64, but the model has 32"),
        (jacobian_content(J={2: torch.zeros(D, D)}), WrongModel, "layer '2'"),
        (jacobian_content(J={"a": torch.zeros(D, D)}), WrongModel, "layer 'a'"),
        (jacobian_content(J={0: torch.zeros(D, 5)}), WrongModel, r"shape .* got \(32, 5\)"),
        (jacobian_content(J={0: torch.zeros(D, D).int()}), BadForeignLens, "int32"),
        (jacobian_content(J={0: torch.full((D, D), torch.nan)}), BadForeignLens, "NaN"),
        (jacobian_content(J={0: "text"}), BadForeignLens, "a str"),
        (jacobian_content(metadata={"target_layer": 1}), WrongModel, "target_layer 1"),
        ({"jacobian_sum": {0: torch.zeros(D, D)}, "n_done": 0}, BadForeignLens, "how many prompts"),
        ({"jacobian_sum": {0: torch.zeros(D, D)}, "n_done": 10**30}, BadForeignLens, "how many prompts"),
        (jacobian_content(J=dict.fromkeys((0, "00"), torch.eye(D))), BadForeignLens, "two matrices"),
        (jacobian_content(J={0: torch.empty(D, D, device="meta")}), BadForeignLens, "expected a dense"),
    ],
)
def test_wrong_jacobian_files(model, tmp_path, content, kind, message):
    torch.save(content, tmp_path / "lens.pt")
    with pytest.raises(kind, match=message):
        lj.import_lens(tmp_path / "lens.pt", model)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"d_model": 64}, WrongModel, "d_model 64"),
        ({"num_hidden_layers": 12}, WrongModel, "num_hidden_layers 12, but the model has 3"),
        ({"num_hidden_layers": None}, BadForeignLens, "expected an integer for num_hidden_layers"),
        ({"lens_type": "mlp"}, BadForeignLens, "lens_type is 'mlp'"),
    ],
)
def test_wrong_tuned_lenses(model, tmp_path, changes, kind, message):
    tuned_folder(tmp_path / "lens", model, **changes)
    with pytest.raises(kind, match=message):
        lj.import_lens(tmp_path / "lens", model)


def test_tuned_lenses_with_other_tensors(model, tmp_path):
    state, _ = tuned_folder(tmp_path / "lens", model)
    for broken, message in (
        ({k: v for k, v in state.items() if k != "1.weight"}, "no 1.weight"),
        ({k: v for k, v in state.items() if k != "2.bias"}, "no 2.bias"),
        (state | {"3.weight": torch.zeros(D, D)}, "'3.weight'"),
        (state | {"0.weight": torch.zeros(2, D, D)}, "shape"),
    ):
        torch.save(broken, tmp_path / "lens" / "params.pt")
        with pytest.raises(BadArtifact, match=message):
            lj.import_lens(tmp_path / "lens", model)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("0_4", torch.zeros(D, D), "levels 0 to 3"),
        ("2_1", torch.zeros(D, D), "levels 0 to 3"),
        ("0_3", torch.zeros(D, 7), "shape"),
        ("0_3", [torch.zeros(D, D)] * 3, "3 things"),
        ("0_3", {"A": torch.zeros(D, D)}, "a dict"),
    ],
)
def test_wrong_mat_folders(model, tmp_path, name, content, message):
    (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(BadArtifact, match=message):
        lj.import_lens(tmp_path, model)


def test_a_file_too_large_for_the_model_is_not_read(model, tmp_path):
    with (tmp_path / "lens.pt").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of holes
    with pytest.raises(BadForeignLens, match="1,099,511,627,776 bytes"):
        lj.import_lens(tmp_path / "lens.pt", model)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("lens/data.pkl", bytes(1 << 26))
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 20
    with pytest.raises(BadForeignLens, match="67,108,864 bytes"):
        lj.import_lens(tmp_path / "bomb.pt", model)


def test_numbers_that_unpack_to_more_than_a_map_are_not_read(model, tmp_path):
    numbers = io.BytesIO()
    torch.save(torch.zeros(1 << 24), numbers)
    packed = io.BytesIO()
    with zipfile.ZipFile(numbers) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small:
        for item in plain.infolist():
            small.writestr(item.filename, plain.read(item))

    class Storage:
        def __reduce__(self):
            return torch.storage._load_from_bytes, (packed.getvalue(),)

    (tmp_path / "0_3.pickle").write_bytes(pickle.dumps(Storage()))
    assert (tmp_path / "0_3.pickle").stat().st_size < 1 << 20
    with pytest.raises(BadForeignLens, match="67,1.* bytes"):
        lj.import_lens(tmp_path, model)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_of_tensors_is_refused(model, tmp_path):
    ragged = torch.nested.nested_tensor([torch.zeros(D), torch.zeros(D + 1)])
    torch.save(jacobian_content(J={0: ragged}), tmp_path / "lens.pt")
    with pytest.raises(BadForeignLens, match="expected a dense tensor"):
        lj.import_lens(tmp_path / "lens.pt", model)


def test_two_files_of_one_map_are_refused(model, tmp_path):
    for name in ("0_3", "00_3"):
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(torch.zeros(D, D)))
    with pytest.raises(BadForeignLens, match="two matrices 0 → 3"):
        lj.import_lens(tmp_path, model)


def test_a_tensor_that_claims_more_numbers_than_it_has_is_refused(model, tmp_path):
    content = pickle.dumps(torch.randn(D, D), protocol=4)
    claimed = content.replace(b"K K \x86", b"M\xff\xffM\xff\xff\x86")  # 65535 × 65535
    assert claimed != content
    (tmp_path / "0_3.pickle").write_bytes(claimed)
    with pytest.raises(BadForeignLens, match="out of bounds"):
        lj.import_lens(tmp_path, model)


def test_what_no_format_can_say_is_refused(model, tmp_path):
    with pytest.raises(BadForeignLens, match="no jump 0 → 3"):
        lj.export_lens(drawn(model, [(1, 3)]), model, tmp_path / "a", "tuned-lens")
    with pytest.raises(BadForeignLens, match="has a bias"):
        lj.export_lens(drawn(model, TO_LAST, bias=True), model, tmp_path / "b.pt", "jacobian")
    broken = drawn(model, TO_LAST)
    with torch.no_grad():
        broken[1, 3].weight[0, 0] = torch.nan
    for format in ("mat", "tuned-lens", "jacobian"):
        with pytest.raises(BadForeignLens, match="1 → 3 holds NaN"):
            lj.export_lens(broken, model, tmp_path / f"nan-{format}", format)
    with pytest.raises(BadForeignLens, match="unknown format 'onnx'"):
        lj.export_lens(drawn(model, TO_LAST), model, tmp_path / "c", "onnx")
    with pytest.raises(WrongModel, match="fitted on"):
        lj.export_lens(synthetic_jumps.jumps(), model, tmp_path / "d", "mat")
    lj.export_lens(drawn(model, TO_LAST), model, tmp_path / "e", "mat")
    with pytest.raises(BadForeignLens, match="holds matrices already"):
        lj.export_lens(drawn(model, TO_LAST), model, tmp_path / "e", "mat")
    with pytest.raises(BadForeignLens, match="unrecognised lens format"):
        lj.import_lens(tmp_path, model)
    with pytest.raises(BadForeignLens, match="does not exist"):
        lj.import_lens(tmp_path / "nowhere", model)
