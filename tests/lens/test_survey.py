"""Survey: the table over a corpus is what trajectories of its documents say."""

import numpy as np
import pandas as pd
import pytest
from helpers.cli import refused, run

import layerjump as lj
from layerjump.data.token_classes import classify_tokens
from layerjump.errors import BadArtifact, BadText, TextTooShort

DOCUMENTS = [
    "Once upon a time, there was a little girl named Lily. She had 12 toys!",
    "Tom saw a big dog.\n\nThe dog ran to the park.",
    "One day, a boy named Tim found 3 balls.",
]


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def jumps(model):
    return lj.fit(model, lj.load_text("pydoc", limit=100))


@pytest.fixture(scope="module")
def survey(model, jumps):
    return lj.survey(model, jumps, DOCUMENTS)


@pytest.mark.parametrize(
    ("texts", "classes"),
    [
        (["Once", " up", "on", " a"], ["first", "word", "continuation", "word"]),
        (["<s>", "Don", "'t", " stop", "!"], ["first", "word", "continuation", "word", "punctuation"]),
        (["x", ' "', "Hi", '"', "\n\n", "The"], ["first", "punctuation", "word", "punctuation", "whitespace", "word"]),
        (
            ["x", " 12", "3", "rd", " €", "\ufffd", ""],
            ["first", *["number"] * 2, "continuation", "punctuation", *["other"] * 2],
        ),
        (["x", "[SEP]", "Äpfel", " 中文"], ["first", "special", "word", "word"]),
    ],
)
def test_classes_of_tokens(texts, classes):
    ids = [99 if text == "[SEP]" else index for index, text in enumerate(texts)]
    assert classify_tokens(ids, texts, {99}) == classes


@pytest.mark.parametrize("document", range(3))
def test_rows_are_the_means_over_a_trajectory(model, jumps, survey, document):
    trajectory = lj.Lens(model, jumps)(DOCUMENTS[document])
    frame, rows = trajectory.to_pandas(), survey.frame
    classes = classify_tokens(trajectory.prompt.ids, trajectory.tokens, model.tokenizer.all_special_ids)
    frame["token_class"] = [classes[position] for position in frame["position"]]
    frame["level"] = frame["level"].astype(int)
    frame["agreement"] = (trajectory.top[:, :, 0] == trajectory.model_top).flatten().numpy()
    for (name, level), cell in frame.groupby(["token_class", "level"]):
        (row,) = rows.query(f"document == {document} and token_class == {name!r} and level == {level}").itertuples()
        assert row.positions == len(cell)
        assert row.agreement == pytest.approx(cell["agreement"].mean())
        assert row.decided == pytest.approx(cell["settled"].mean())
        for column, of_survey in (("entropy", row.entropy), ("kl", row.kl), ("probability", row.probability)):
            assert of_survey == pytest.approx(cell[column].mean(), rel=1e-3, abs=1e-5)
        assert row.targets == cell["cross_entropy"].notna().sum()
        if row.targets:
            assert row.surprisal == pytest.approx(cell["cross_entropy"].mean(), rel=1e-4)
        assert dict(zip(row.tokens, row.counts, strict=True)) == cell["top"].value_counts().to_dict()
    assert len(rows[rows["document"] == document]) == len(set(classes)) * len(trajectory.levels)


def test_documents_and_classes_together(model, jumps, survey):
    trajectories = lj.Lens(model, jumps)(DOCUMENTS)
    together = survey.by_level().query("token_class == 'all'").set_index("level")
    entropy = np.concatenate([trajectory.entropy.numpy() for trajectory in trajectories], 1)
    np.testing.assert_allclose(together["entropy"], entropy.mean(1), rtol=1e-4)
    surprisal = np.concatenate([trajectory.cross_entropy.numpy() for trajectory in trajectories], 1)
    np.testing.assert_allclose(together["surprisal"], np.nanmean(surprisal, 1), rtol=1e-4)
    settled = [trajectory.settled_level.double().mean().item() for trajectory in trajectories]
    np.testing.assert_allclose(survey.by_document()["decided_level"], settled)
    top = pd.Series([token for t in trajectories for token in t.decode(t.top[2, :, 0].tolist())])
    assert dict(survey.most_read(2, n=1000)) == pytest.approx(top.value_counts(normalize=True).to_dict())
    assert survey.most_read(2, n=1000)[0][1] == max(dict(survey.most_read(2, n=1000)).values())


def test_parts_of_a_long_document_are_one_row(model, survey):
    whole = lj.survey(model, None, DOCUMENTS[:1])
    parts = lj.survey(model, None, DOCUMENTS[:1], max_length=8)
    assert whole.frame["positions"].sum() == parts.frame["positions"].sum()
    assert parts.frame.query("token_class == 'first' and level == 0")["positions"].tolist() == [
        -(-len(model.tokenization.encode(DOCUMENTS[:1])[0]) // 8)
    ]


def test_a_survey_is_written_as_it_goes_and_read_back(model, jumps, survey, tmp_path):
    path = tmp_path / "survey.parquet"
    written = lj.survey(model, jumps, DOCUMENTS, output=path)
    pd.testing.assert_frame_equal(written.frame, survey.frame)
    loaded = lj.Survey.load(path)
    assert loaded.info == survey.info
    pd.testing.assert_frame_equal(loaded.by_level(), survey.by_level())
    assert len(pd.read_parquet(path)) == len(survey.frame)
    survey.save(tmp_path / "again.parquet")
    pd.testing.assert_frame_equal(lj.Survey.load(tmp_path / "again.parquet").frame, survey.frame)
    assert len(survey.plot().data) == 4 * survey.by_level()["token_class"].nunique()


def test_a_survey_that_fails_leaves_no_file(model, tmp_path):
    def stop(done, total):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        lj.survey(model, None, DOCUMENTS, output=tmp_path / "survey.parquet", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_tokens_bound_what_is_read(model):
    corpus = lj.load_text("pydoc", limit=100)
    some = lj.survey(model, None, corpus, tokens=500).frame
    n_positions = some[some["level"] == 0]["positions"].sum()
    assert 500 <= n_positions < 500 + 512


def test_a_masked_model_is_read_at_its_masks(data_folder):
    model = lj.load(data_folder / "tiny-bert")
    frame = lj.survey(model, None, lj.load_text("pydoc", limit=20)).frame
    assert not {"first", "special"} & set(frame["token_class"])
    assert (frame["targets"] == frame["positions"]).all()
    last = frame[frame["level"] == model.n_blocks]
    assert (last["agreement"] == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"corpus": lj.Corpus("nothing", (), "")}, "got none in nothing"), ({"tokens": 0}, "tokens of 1 or more")],
)
def test_what_cannot_be_surveyed_is_refused(model, options, message):
    with pytest.raises(BadText, match=message):
        lj.survey(model, None, **{"corpus": DOCUMENTS, **options})


def test_other_bad_input_is_refused(model, survey, tmp_path):
    with pytest.raises(TextTooShort, match="no tokens|position to read"):
        lj.survey(lj.load(model.name.replace("gpt2", "bert")), None, lj.Corpus("blanks", ("", ""), ""))
    with pytest.raises(BadText, match="level from 0 to 4"):
        survey.most_read(9)
    with pytest.raises(BadText, match="token_class first"):
        survey.most_read(2, "verbs")
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(BadArtifact, match="cannot be read as Parquet"):
        lj.Survey.load(tmp_path / "text.parquet")
    pd.DataFrame({"text": ["a"]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(BadArtifact, match="expected a survey"):
        lj.Survey.load(tmp_path / "other.parquet")


def test_the_command_writes_a_table_and_a_page(data_folder, tmp_path, monkeypatch, capsys):
    text, model = tmp_path / "text.txt", str(data_folder / "tiny-gpt2")
    text.write_text("\n\n".join(DOCUMENTS))
    output = tmp_path / "out"
    command = ("survey", model, "--lens", "identity", "--text", str(text), "-o", str(output))
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "read" in done.stdout
    page = (output / "report.html").read_text()
    assert "When predictions are decided" in page
    assert "What each level reads most" in page
    assert lj.Survey.load(output / "survey.parquet").info.lens == "identity"
    assert "a survey already" in refused(monkeypatch, capsys, *command)
    text.write_text("\n \n")
    assert "only whitespace" in refused(monkeypatch, capsys, *command, "--force")
