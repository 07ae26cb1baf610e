"""Lenses of other tools come and go without loss, and never bring code along."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile

import made
import numpy as np
import pytest
import torch
from tiny import tiny_model
from typer.testing import CliRunner

import layerjump as lj
from layerjump.cli.app import app
from layerjump.errors import BadArtifact, BadEstimator, BadForeignLens, UnsafePickle, WrongModel
from layerjump.fit.affine import Affine
from layerjump.fit.fingerprint import fingerprint
from layerjump.fit.jumps import JumpInfo, Jumps
from layerjump.inputs.models import Model
from layerjump.inputs.sites import Site

D, L = 32, 3


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.wrap(tiny_model("gpt2", dtype=torch.float32), name="tiny")


def drawn(model: Model, pairs, *, bias: bool = False, rank: int | None = None) -> Jumps:
    """Jumps of the model with random weights, in float32."""
    draw = torch.Generator().manual_seed(1)
    maps = {}
    for source, target in pairs:
        shapes = [(D, D)] if rank is None else [(D, rank), (rank, D)]
        factors = [torch.randn(shape, generator=draw) for shape in shapes]
        shift = torch.randn(D, generator=draw) if bias else None
        maps[Site(source), Site(target)] = Affine.of(*factors, bias=shift)
    infos = {pair: JumpInfo(*pair, "mat", rank=rank) for pair in maps}
    known = made.provenance(
        n_blocks=L, width=D, fingerprint=fingerprint(model.hf), settings={"n_prompts": 7}
    )
    return Jumps.of(maps, infos, known)


def same_maps(one: Jumps, other: Jumps) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


TO_LAST = [(level, L) for level in range(L)]
ALL_PAIRS = [(i, j) for i in range(L) for j in range(i + 1, L + 1)]


def tuned_folder(folder, model, **changes):
    """A tuned lens as its package saves it."""
    draw = torch.Generator().manual_seed(2)
    state = {}
    for level in range(L):
        state[f"{level}.weight"] = 0.1 * torch.randn(D, D, generator=draw)
        state[f"{level}.bias"] = torch.randn(D, generator=draw)
    printed = np.array_str(model.hf.lm_head.weight.detach().numpy(), precision=1)
    config = {
        "base_model_name_or_path": "somebody/tiny",
        "d_model": D,
        "num_hidden_layers": L,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": hashlib.sha256(printed.encode()).hexdigest(),
        "lens_type": "linear_tuned_lens",
    }
    folder.mkdir()
    torch.save(state, folder / "params.pt")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return state, config


def jacobian_content(**changes):
    draw = torch.Generator().manual_seed(3)
    matrices = {layer: torch.randn(D, D, generator=draw).half() for layer in range(L - 1)}
    return {"J": matrices, "n_prompts": 12, "source_layers": [0, 1], "d_model": D} | changes


# What is read


def test_a_tuned_lens_adds_its_translators_to_the_state(model, tmp_path, caplog):
    state, config = tuned_folder(tmp_path / "lens", model)
    jumps = lj.import_lens(tmp_path / "lens", model)
    assert list(jumps) == [(Site(level), Site(L)) for level in range(L)]
    h = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    for level in range(L):
        theirs = h + h @ state[f"{level}.weight"].mT + state[f"{level}.bias"]
        torch.testing.assert_close(jumps[level, L](h), theirs)
        torch.testing.assert_close(
            lj.Lens(model, jumps).logits(level, h),
            model.hf.lm_head(model.hf.transformer.ln_f(theirs)),
        )
    assert caplog.text == ""
    known = jumps.provenance
    assert (known.estimator, known.text, known.tokens, known.n_fit) == (
        "tuned-lens",
        "unknown",
        0,
        0,
    )
    assert known.settings == {"imported_from": "lens", **config}
    assert known.fingerprint == fingerprint(model.hf)
    assert "unknown text" in repr(jumps)


def test_another_unembedding_is_warned_of(model, tmp_path, caplog):
    tuned_folder(tmp_path / "lens", model, unembed_hash="0" * 64)
    lj.import_lens(tmp_path / "lens", model)
    assert "another unembedding" in caplog.text


def test_mat_matrices_multiply_from_the_left(model, tmp_path):
    """As written by the paper's scripts: sklearn's coef_ as a tensor, or a list of it and the intercept."""
    weight, bias = torch.randn(D, D), torch.randn(D)
    (tmp_path / "1_3.pickle").write_bytes(pickle.dumps(weight))
    (tmp_path / "0_2.pickle").write_bytes(pickle.dumps([weight, bias]))
    (tmp_path / "p0_1_2.pickle").write_bytes(b"of a part of a block, and not read")
    jumps = lj.import_lens(tmp_path, model)
    assert list(jumps) == [(Site(0), Site(2)), (Site(1), Site(3))]
    h = torch.randn(D)
    torch.testing.assert_close(jumps[1, 3](h), weight @ h)
    torch.testing.assert_close(jumps[0, 2](h), weight @ h + bias)
    assert jumps.provenance.estimator == "mat"
    assert torch.equal(lj.import_lens(tmp_path / "1_3.pickle", model)[1, 3].weight, weight)


def test_a_jacobian_files_layer_is_what_leaves_that_block(model, tmp_path):
    content = jacobian_content(metadata={"corpus": "wiki", "skip_first_positions": 16, "x": [1]})
    torch.save(content, tmp_path / "lens.pt")
    jumps = lj.import_lens(tmp_path / "lens.pt", model)
    assert list(jumps) == [(Site(1), Site(3)), (Site(2), Site(3))]
    for layer, matrix in content["J"].items():
        assert torch.equal(jumps[layer + 1, L].weight, matrix.float())
    known = jumps.provenance
    assert (known.estimator, known.text, known.skip_first) == ("jacobian", "wiki", 16)
    assert known.settings["n_prompts"] == 12
    assert "x" not in known.settings


def test_a_running_sum_is_divided_by_its_prompts(model, tmp_path):
    matrices = {0: torch.randn(D, D), 1: torch.randn(D, D)}
    content = {"jacobian_sum": matrices, "n_done": 4, "target_layer": L - 1, "skip_first": 16}
    torch.save(content, tmp_path / "fit.pt")
    jumps = lj.import_lens(tmp_path / "fit.pt", model)
    assert torch.equal(jumps[2, L].weight, matrices[1] / 4)
    assert jumps.provenance.skip_first == 16


# There and back


@pytest.mark.parametrize("bias", [False, True])
def test_a_tuned_lens_comes_back_to_the_bit(model, tmp_path, bias):
    jumps = drawn(model, TO_LAST, bias=bias)
    assert lj.export_lens(jumps, model, tmp_path / "lens", "tuned-lens") == []
    again = lj.import_lens(tmp_path / "lens", model)
    assert same_maps(again, jumps)
    lj.export_lens(again, model, tmp_path / "second", "tuned-lens")
    first, second = (torch.load(tmp_path / name / "params.pt") for name in ("lens", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    config = json.loads((tmp_path / "lens" / "config.json").read_text())
    assert config == json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["unembed_hash"] == tuned_folder(tmp_path / "theirs", model)[1]["unembed_hash"]


def test_what_is_exported_loads_into_the_packages_modules(model, tmp_path):
    """Its lens is a ModuleList of Linears with biases, loaded strictly; h + translator(h) is then ours."""
    jumps = drawn(model, TO_LAST)
    lj.export_lens(jumps, model, tmp_path / "lens", "tuned-lens")
    translators = torch.nn.ModuleList([torch.nn.Linear(D, D) for _ in range(L)])
    translators.load_state_dict(torch.load(tmp_path / "lens" / "params.pt"))
    h = torch.randn(4, D)
    for level, translator in enumerate(translators):
        torch.testing.assert_close(h + translator(h), jumps[level, L](h), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_mat_pickles_come_back_to_the_bit(model, tmp_path, bias):
    jumps = drawn(model, ALL_PAIRS, bias=bias)
    assert lj.export_lens(jumps, model, tmp_path / "linreg", "mat") == []
    assert same_maps(lj.import_lens(tmp_path / "linreg", model), jumps)
    plain = pickle.loads((tmp_path / "linreg" / "0_3.pickle").read_bytes())
    assert torch.equal(plain[0] if bias else plain, jumps[0, 3].weight)


def test_a_jacobian_file_comes_back_to_the_bit_but_for_level_0(model, tmp_path, caplog):
    jumps = drawn(model, TO_LAST)
    left_out = lj.export_lens(jumps, model, tmp_path / "lens.pt", "jacobian")
    assert left_out == [(Site(0), Site(L))]
    assert "1 of 3 jumps left out" in caplog.text
    again = lj.import_lens(tmp_path / "lens.pt", model)
    assert all(torch.equal(again[pair].weight, jumps[pair].weight) for pair in again)
    assert len(again) == 2
    assert (again.provenance.estimator, again.provenance.text) == ("mat", "pydoc")
    lj.export_lens(again, model, tmp_path / "second.pt", "jacobian")
    assert same_maps(lj.import_lens(tmp_path / "second.pt", model), again)


def test_thin_factors_are_multiplied_out(model, tmp_path):
    jumps = drawn(model, TO_LAST, rank=4)
    lj.export_lens(jumps, model, tmp_path / "linreg", "mat")
    h = torch.randn(3, D)
    found = lj.import_lens(tmp_path / "linreg", model)
    torch.testing.assert_close(found[1, L](h), jumps[1, L](h), rtol=1e-4, atol=1e-4)


def test_an_imported_lens_works_from_a_saved_folder(data_folder, tmp_path):
    """Read, read with, generated with: as any fitted one."""
    model = lj.load(data_folder / "tiny-gpt2")
    fitted = lj.fit(model, "pydoc", tokens=3000, sizes="100/0/0")
    lj.export_lens(fitted, model, tmp_path / "lens", "tuned-lens")
    lj.import_lens(tmp_path / "lens", model).save_pretrained(tmp_path / "jumps")
    jumps = lj.Jumps.from_pretrained(tmp_path / "jumps", model=model)
    text = "Once upon a time"
    ours, theirs = lj.Lens(model, fitted)(text), lj.Lens(model, jumps)(text)
    assert (ours.top == theirs.top).all()
    written = [
        lj.generate(model, each, text, exit="gap:0.2", max_new_tokens=8).ids
        for each in (fitted, jumps)
    ]
    assert written[0] == written[1]


# What is refused


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
        (jacobian_content(d_model=64), WrongModel, "d_model 64, but the model given has 32"),
        (jacobian_content(J={2: torch.zeros(D, D)}), WrongModel, "layer '2'"),
        (jacobian_content(J={"a": torch.zeros(D, D)}), WrongModel, "layer 'a'"),
        (jacobian_content(J={0: torch.zeros(D, 5)}), WrongModel, r"shape \(32, 5\)"),
        (jacobian_content(J={0: torch.zeros(D, D).int()}), BadForeignLens, "int32"),
        (jacobian_content(J={0: torch.full((D, D), torch.nan)}), BadForeignLens, "NaN"),
        (jacobian_content(J={0: "text"}), BadForeignLens, "a str"),
        (jacobian_content(metadata={"target_layer": 1}), WrongModel, "target_layer 1"),
        ({"jacobian_sum": {0: torch.zeros(D, D)}, "n_done": 0}, BadForeignLens, "how many prompts"),
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
        ({"num_hidden_layers": 12}, WrongModel, "num_hidden_layers 12, but the model given has 3"),
        ({"num_hidden_layers": None}, BadForeignLens, "an integer was wanted"),
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


def test_wrong_mat_folders(model, tmp_path):
    for name, content, message in (
        ("0_4", torch.zeros(D, D), "levels 0 to 3"),
        ("2_1", torch.zeros(D, D), "levels 0 to 3"),
        ("0_3", torch.zeros(D, 7), "shape"),
        ("0_3", [torch.zeros(D, D)] * 3, "3 things"),
        ("0_3", {"A": torch.zeros(D, D)}, "a dict"),
    ):
        folder = tmp_path / str(message.__hash__())
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(content))
        with pytest.raises(BadArtifact, match=message):
            lj.import_lens(folder, model)


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
    with pytest.raises(BadForeignLens, match="no format 'onnx'"):
        lj.export_lens(drawn(model, TO_LAST), model, tmp_path / "c", "onnx")
    with pytest.raises(WrongModel, match="fitted on"):
        lj.export_lens(made.jumps(), model, tmp_path / "d", "mat")
    lj.export_lens(drawn(model, TO_LAST), model, tmp_path / "e", "mat")
    with pytest.raises(BadForeignLens, match="holds matrices already"):
        lj.export_lens(drawn(model, TO_LAST), model, tmp_path / "e", "mat")
    with pytest.raises(BadForeignLens, match="no lens that is known"):
        lj.import_lens(tmp_path, model)
    with pytest.raises(BadForeignLens, match="there is no file"):
        lj.import_lens(tmp_path / "nowhere", model)


# The command line


def test_export_and_import_as_commands(data_folder, tmp_path):
    folder, lens = str(data_folder / "tiny-gpt2"), str(tmp_path / "lens.pt")
    model = lj.load(folder)
    fitted = lj.fit(model, "pydoc", tokens=1000, sizes="100/0/0")
    fitted.save_pretrained(tmp_path / "jumps")
    run = CliRunner()
    where = ["--model", folder, "-o"]
    done = run.invoke(
        app, ["export", str(tmp_path / "jumps"), "--format", "jacobian", *where, lens]
    )
    assert done.exit_code == 0, done.stderr
    done = run.invoke(app, ["import", lens, *where, str(tmp_path / "again"), "--json"])
    assert done.exit_code == 0, done.stderr
    assert [row["jump"] for row in json.loads(done.stdout)] == ["1 → 4", "2 → 4", "3 → 4"]
    again = lj.Jumps.from_pretrained(tmp_path / "again", model=model)
    assert all(torch.equal(again[pair].weight, fitted[pair].weight) for pair in again)


def test_a_refused_file_is_one_line(data_folder, tmp_path):
    (tmp_path / "lens.pt").write_bytes(b"no")
    command = [sys.executable, "-m", "layerjump", "import", str(tmp_path / "lens.pt")]
    command += ["--model", str(data_folder / "tiny-gpt2"), "-o", str(tmp_path / "jumps")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "jumps").exists()


def test_the_jacobian_lens_is_fitted_by_command(data_folder, tmp_path):
    command = ["fit", str(data_folder / "tiny-gpt2"), "--estimator", "jacobian", "--tokens", "100"]
    run = CliRunner()
    done = run.invoke(app, [*command, "-o", str(tmp_path), "--seed", "2", "--json"])
    assert done.exit_code == 0, done.stderr
    model = lj.load(data_folder / "tiny-gpt2")
    wanted = lj.jacobian(model, "pydoc", tokens=100, seed=2)
    assert same_maps(lj.Jumps.from_pretrained(tmp_path, model=model), wanted)
    refused = run.invoke(app, [*command, "--rank", "3"])
    assert isinstance(refused.exception, BadEstimator)
    assert "--rank was given" in str(refused.exception)
