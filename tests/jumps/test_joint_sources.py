"""Jumps of several sources and across positions: the statistics, the maps, the files, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import fitted_gpt2
from helpers.cli import refused
from helpers.comparisons import same_bytes
from helpers.tiny_models import tiny_model, wrapped

import layerjump as lj
from layerjump.cli.inspect import inspect
from layerjump.data.corpus import Corpus, split_indices
from layerjump.errors import BadEstimator, BadJumps, BadModel, BadText
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.cost_estimate import GRAM_SHARE
from layerjump.jumps.layer_pass import capture_by_layer
from layerjump.jumps.serialization import TEXT
from layerjump.models.model import capture_states
from layerjump.models.self_check import sample
from layerjump.models.sites import EMBEDDING, FINAL, JointSource, Site, Term, parse_pairs, parse_source

model, text = fitted_gpt2.model, fitted_gpt2.text  # fixtures
DRAFT_HEAD = "final@-1+embedding"
RUN = ("--estimator", "ridge", "--pairs", "to-final+final@-1", "--tokens", "8000", "--checkpoint-seconds", "0")


@torch.no_grad()
def states_of(model, document):
    """Every position of a document, of one plain pass of the Hugging Face model: embedding, levels, final."""
    ids = torch.tensor([model.tokenization.wrap(model.tokenization.encode([document])[0])])
    output = model.hf(ids, output_hidden_states=True)
    table = model.hf.get_input_embeddings().weight
    # Of a GPT-2 the last hidden state is after the final norm.
    states = {str(level): state[0] for level, state in enumerate(output.hidden_states[:-1])}
    return states | {"final": output.hidden_states[-1][0], "embedding": table[ids[0]]}


def hand_written(model, corpus, documents, terms, target):
    """Rows of sources side by side and of targets, put together document by document."""
    xs, ys = [], []
    for index in documents:
        states = {name: rows.double().numpy() for name, rows in states_of(model, corpus.documents[index]).items()}
        lag = max(-offset for _, offset in terms)
        for t in range(1 + lag, len(states["final"])):  # position 0, an attention sink, is no source either
            xs.append(np.concatenate([states[site][t + offset] for site, offset in terms]))
            ys.append(states[target][t])
    return np.array(xs), np.array(ys)


@pytest.mark.parametrize(
    ("source", "target", "terms"),
    [
        (DRAFT_HEAD, "final", [("final", -1), ("embedding", 0)]),
        ("final@-1+1", "3", [("final", -1), ("1", 0)]),
        ("2+2@-1+1@-3", "final", [("2", 0), ("2", -1), ("1", -3)]),
        ("final@-2", "final", [("final", -2)]),
    ],
)
def test_a_joint_jump_is_the_least_squares_fit_of_states_side_by_side(source, target, terms, model, text):
    """Rows of hand-written regressions never cross documents, and start where the earliest state counts."""
    short = Corpus("short", tuple(document[:100] for document in text.documents), "")
    jumps = lj.fit(model, short, estimator="affine", sources=source, target=target, split="90/0/10")
    parts = split_indices(len(short.documents), "90/0/10", seed=0)
    x, y = hand_written(model, short, parts.fit, terms, target)
    x_test, y_test = hand_written(model, short, parts.test, terms, target)
    assert (jumps.provenance.n_fit, jumps.provenance.n_test) == (len(x), len(x_test))
    assert jumps.provenance.skip_first == 1 + max(-offset for _, offset in terms)
    # The outputs of a layer norm have a direction in which they do not vary but by rounding.
    solution = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=1e-5)[0]
    predicted = (x_test - x.mean(0)) @ solution + y.mean(0)
    ours = jumps[source, target](torch.from_numpy(x_test).float()).numpy()
    assert np.abs(ours - predicted).max() < 1e-3 * y_test.std()
    r2 = 1 - ((predicted - y_test) ** 2).sum() / ((y_test - y_test.mean(0)) ** 2).sum()
    assert jumps.info[source, target].r2[1] == pytest.approx(r2, abs=1e-5)


def test_moments_of_joint_sources_are_those_of_the_rows(model, text):
    """In float64 from captured states, with nothing of the solver in between."""
    run = plan_run(model, text, pairs="final@-1+2:final,2:final", tokens=4_000)
    moments = run.run().fit
    (joint,) = (source for source in moments.sources if isinstance(source, JointSource))
    rows = [
        (states[joint].double(), states["final"].double())
        for states in capture_states(model, run.batches["fit"], [joint, "final"])
    ]
    x, y = (torch.cat(column) for column in zip(*rows, strict=True))
    assert moments.n == len(x) == run.batches["fit"].n_picks
    source, target = moments.source(joint), moments.target(joint, FINAL)
    centred = x - x.mean(0)
    assert torch.allclose(source.scatter, centred.mT @ centred, rtol=1e-10, atol=1e-8)
    assert torch.allclose(target.cross, centred.mT @ (y - y.mean(0)), rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "opt"])
def test_joint_states_are_shifted_rows_of_plain_ones(family):
    """Rows of different lengths and padding: a source never reads another sequence."""
    model = wrapped(tiny_model(family, dtype=torch.float32))
    batch = sample(model, rows=3, length=7)
    sources = ["final@-2+1+embedding@-1", "2", "embedding"]
    (joint,) = capture_states(model, [batch], sources, logits=True)
    (plain,) = capture_states(model, [batch], ["final", 1, 2, "embedding"], logits=True)
    index = {(int(row), int(at)): i for i, (row, at) in enumerate(zip(batch.row, batch.position, strict=True))}
    table = model.structure.token_embedding.weight
    for i, (row, at) in enumerate(zip(batch.row.tolist(), batch.position.tolist(), strict=True)):
        earlier = [index[row, max(at - lag, 0)] for lag in (2, 1)]
        expected = torch.cat([plain["final"][earlier[0]], plain[1][i], plain["embedding"][earlier[1]]])
        assert torch.equal(joint[sources[0]][i], expected)
        assert torch.equal(plain["embedding"][i], table[batch.input_ids[row, at]])
    assert torch.equal(joint[2], plain[2])
    assert torch.equal(joint.logits, plain.logits)


def test_a_pass_layer_by_layer_gives_the_same_joint_states():
    model = wrapped(tiny_model("llama", dtype=torch.float32))
    batches = [sample(model), sample(model, rows=3, length=7)]
    sources = [parse_source(source) for source in ("final@-1+1", "embedding", "2")]
    pairs = zip(capture_by_layer(model, batches, sources), capture_states(model, batches, sources), strict=True)
    for by_layer, plain in pairs:
        assert all(torch.equal(by_layer[source], plain[source]) for source in sources)


@pytest.mark.parametrize("estimator", ["mat", "ridge", "low-rank", "ojfa", "calibrated"])
def test_estimators_spill_and_files_treat_the_concatenation_as_one_source(estimator, model, text, tmp_path):
    options = {"estimator": estimator, "pairs": "to-final+final@-1", "tokens": 5_000}
    options |= {"rank": 8} if estimator == "low-rank" else {}
    jumps = lj.fit(model, text, **options)
    lj.fit(model, text, spill=tmp_path / "states", **options).save_pretrained(tmp_path / "spilled")
    jumps.save_pretrained(tmp_path / "whole")
    assert same_bytes(tmp_path / "whole", tmp_path / "spilled")
    loaded = lj.Jumps.from_pretrained(tmp_path / "whole", model=model)
    assert list(loaded) == [(parse_source(f"{level}+final@-1"), FINAL) for level in range(4)]
    states = torch.randn(3, 2 * model.d_model)
    for pair in jumps:
        assert torch.equal(loaded[pair](states), jumps[pair](states))
        assert loaded.info[pair] == jumps.info[pair]
        assert loaded[str(pair[0]), "final"] is loaded[pair]


def test_memory_of_the_previous_position_explains_more(model, text):
    jumps = lj.fit(model, text, estimator="ridge", pairs="2:final,2+final@-1:final,2@-1:final")
    one, both, before = (jumps.info[source, "final"].r2[1] for source in ("2", "2+final@-1", "2@-1"))
    assert both > one + 0.005
    assert before < one - 0.1


def test_the_format_version_is_raised_only_for_joint_sources(model, text, tmp_path):
    for pairs, version in (("1:final", 1), ("1@-1:final", 2), ("embedding:final", 2)):
        lj.fit(model, text, pairs=pairs, tokens=4_000).save_pretrained(tmp_path)
        assert json.loads((tmp_path / TEXT).read_text())["format_version"] == version


def test_the_memory_bill_counts_the_width_of_all_sources(model, text):
    one, both = (plan_run(model, text, pairs=pairs, tokens=4_000).cost for pairs in ("1:final", "1+final@-1:final"))
    # g d² + d² for a Gram matrix of which the share g is computed, and its cross products → 4 g d² + 2 d²
    growth = (4 * GRAM_SHARE + 2) / (GRAM_SHARE + 1)
    assert both.sums_flops / both.positions == pytest.approx(growth * one.sums_flops / one.positions)
    assert both.jumps_bytes == 2 * one.jumps_bytes


def test_killed_and_resumed_by_two_processes_it_ends_in_the_same_bytes(data_folder, tmp_path, capsys):
    def command(folder, *options):
        return ["-m", "layerjump", "fit", str(data_folder / "tiny-gpt2"), *RUN, "-o", str(tmp_path / folder), *options]

    done = subprocess.run([sys.executable, *command("whole")], capture_output=True, text=True, check=True)
    assert "2+final@-1 → final" in done.stdout
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, *command("killed")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (killed / "unfinished-0-of-1.safetensors").is_file():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "jumps.safetensors").exists()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *command("killed", "--resume")], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "resuming after" in done.stderr
    assert same_bytes(tmp_path / "whole", killed)
    inspect(killed, as_json=True)
    assert "2+final@-1 → final" in capsys.readouterr().out


# -- the spelling


@pytest.mark.parametrize("name", ["5", "final@-1", "final@-1+1", "embedding+final@-1", "3.attn.out@-12+3+final@-1"])
def test_names_of_sources_round_trip(name):
    source = parse_source(name)
    assert str(source) == name
    assert parse_source(f" {name.replace('+', ' + ')} ") == source == parse_source(list(source.terms))
    assert hash(parse_source(str(source))) == hash(source)


def test_a_source_is_also_a_list_in_python():
    expected = JointSource(joined=(Term(FINAL, -1), Term(Site(1), 0)))
    assert parse_source(["final@-1", 1]) == parse_source([("final", -1), 1]) == expected
    assert parse_source([EMBEDDING]) == EMBEDDING
    assert parse_source("1+final@-1") != expected  # the order of the columns


def test_sources_sort_with_their_level(model):
    pairs = parse_pairs("to-final+final@-1", model.structure)
    assert [str(source) for source in sorted([*(source for source, _ in pairs), Site(2)])] == [
        *("0+final@-1", "1+final@-1", "2+final@-1", "2", "3+final@-1")
    ]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("final@1+2", "expected an offset of 0 or an earlier position"),
        ("final@", "expected an offset"),
        ("final@-9999", "expected an offset"),
        ("final@-1.5", "expected an offset"),
        ("2+2", "one of them twice"),
        ("+".join(f"1@-{lag}" for lag in range(9)), "expected 1 to 8 sites"),
        ("2++3", "expected a site"),
        ("ffn@-1", "expected a site"),
        ("9+final@-1", "expected one of levels 0 to 4"),
        ("final+1", "holds its target"),
    ],
)
def test_bad_sources_are_refused_in_one_line(bad, message, model, text, data_folder, monkeypatch, capsys):
    with pytest.raises(BadModel, match=message) as error:
        lj.fit(model, text, sources=bad, target="final")
    assert "\n" not in str(error.value)
    assert message in refused(
        monkeypatch, capsys, "fit", str(data_folder / "tiny-gpt2"), "--sources", bad, "--target", "final"
    )


def test_sources_come_with_a_target_and_without_pairs(model, text):
    for wrong in ({"sources": "1"}, {"target": "final"}, {"sources": "1", "target": "2", "pairs": "all"}):
        with pytest.raises(BadModel, match="together, or pairs alone"):
            lj.fit(model, text, **wrong)
    with pytest.raises(BadModel, match="expected a site"):
        lj.fit(model, text, sources="1", target="final@-1")


def test_what_cannot_read_a_joint_source_says_so(model, text):
    with pytest.raises(BadEstimator, match="expected a source as wide as its target for identity"):
        lj.fit(model, text, estimator="identity", sources="1+final@-1", target="final")
    with pytest.raises(BadText, match="got first"):
        lj.fit(model, text, sources="1+final@-1", target="final", positions="first")
    for site in (EMBEDDING, parse_source("1+final@-1")):
        with pytest.raises(BadModel, match="which only a jump can start from"):
            model.structure.tap(site)
    jumps = lj.fit(model, text, sources="1+final@-1", target="final", tokens=4_000)
    with pytest.raises(BadJumps, match="only 1\\+final@-1 → final"):
        jumps["final@-1+1", "final"]
