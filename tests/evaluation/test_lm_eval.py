"""`layerjump.evaluation` gives lm-eval's own numbers, item for item, and those of early exit and replaced parts."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import fitted_gpt2, task_data
from helpers.story_text import stories
from helpers.task_data import LINES, write_questions

import layerjump as lj
from layerjump.errors import BadEvaluation, LayerjumpError
from layerjump.evaluation.model_variants import EarlyExitModel, LinearizedModel, WholeModel, make_variant, parse_blocks
from layerjump.evaluation.tasks import TASKS, evaluate, load_items, select_tasks, wilson_interval

pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")

tiny, data = fitted_gpt2.model, task_data.data  # fixtures


@pytest.fixture(scope="module")
def jumps(tiny):
    return lj.fit(tiny, stories(200), tokens=6_000)


@pytest.fixture(scope="module")
def plain(tiny, data):
    return evaluate(tiny, "all", data)


def run_hf_model(folder, data, names):
    """Run the same tasks with lm-eval's `hf` model, which loads the checkpoint itself."""
    from lm_eval.evaluator import evaluate as run
    from lm_eval.models.huggingface import HFLM

    from layerjump.evaluation.lm_eval import LocalTask

    model = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    tasks = {name: LocalTask(TASKS[name], load_items(TASKS[name], data)) for name in names}
    return run(model, tasks, bootstrap_iters=1000)


def same_items(evaluation, hf_results) -> None:
    for name, items in evaluation.items.items():
        samples = hf_results["samples"][name]
        assert [(item.loglikelihoods, item.greedy) for item in items] == [
            tuple(map(list, zip(*sample["filtered_resps"], strict=True))) for sample in samples
        ]


def likelihoods(evaluation) -> dict:
    return {name: [item.loglikelihoods for item in items] for name, items in evaluation.items.items()}


def test_every_task_equals_lm_evals_hf_model_item_for_item(data_folder, data, plain):
    evaluation = run_hf_model(data_folder / "tiny-gpt2", data, TASKS)
    same_items(plain, evaluation)
    assert {name: len(items) for name, items in plain.items.items()} == {
        name: len(LINES[task.file]) for name, task in TASKS.items()
    }
    for row in plain.scores:
        scores = evaluation["results"][row.task]
        assert row.value == pytest.approx(scores[f"{row.metric},none"], rel=1e-12)
        if row.stderr is not None:
            assert row.stderr == pytest.approx(scores[f"{row.metric}_stderr,none"], abs=1e-12)
    assert plain.truncated == 0
    assert plain.mean_level is None


def test_a_real_checkpoint_equals_lm_evals_hf_model(real_folder, data):
    folder, names = real_folder("stories15M"), ("arc_easy", "lambada", "boolq")
    evaluation = evaluate(lj.load(folder), names, data)
    same_items(evaluation, run_hf_model(folder, data, names))
    correct = next(row for row in evaluation.scores if row.task == "lambada")
    assert correct.value > 0  # a trained model ends at least one of the stories as they end


def test_the_batch_size_changes_rounding_only(tiny, data, plain):
    evaluation = likelihoods(evaluate(tiny, "all", data, batch_size=4))
    for name, items in likelihoods(plain).items():
        for ours, alone in zip(evaluation[name], items, strict=True):
            assert ours == pytest.approx(alone, abs=1e-4)


def test_a_rule_that_never_exits_is_the_whole_model(tiny, jumps, data, plain):
    never = evaluate(tiny, "all", data, variant=EarlyExitModel(jumps, "never"))
    assert never.items == plain.items
    unreachable = evaluate(tiny, "all", data, variant=EarlyExitModel(jumps, "maxprob:1.1"))
    assert unreachable.items == plain.items
    assert unreachable.mean_level == tiny.n_blocks


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_fixed_exit_level_equals_the_lens(tiny, jumps, data, batch_size):
    names = ("copa", "lambada", "winograd")
    evaluation = evaluate(tiny, names, data, variant=EarlyExitModel(jumps, "fixed:2"), batch_size=batch_size)
    assert evaluation.mean_level == 2
    lens, tokenizer = lj.Lens(tiny, jumps), tiny.tokenizer
    for name in names:
        for item, scored in zip(load_items(TASKS[name], data), evaluation.items[name], strict=True):
            expected = [_read(tiny, lens, tokenizer, *pair) for pair in _pairs(item)]
            assert scored.loglikelihoods == pytest.approx(expected, abs=1e-4)


def _pairs(item):
    """Return the (context, continuation) pairs of lm-eval's requests."""
    if item.context is None:
        return [(context, f" {item.target}") for context in item.choices]
    if item.choices is None:
        return [(item.context, item.target)]
    return [(item.context, f" {choice}") for choice in item.choices]


@torch.no_grad()
def _read(model, lens, tokenizer, context, continuation) -> float:
    whole = tokenizer.encode(context + continuation)
    start = len(tokenizer.encode(context))
    states = model.hf(torch.tensor([whole]), output_hidden_states=True).hidden_states[2][0]
    scores = lens.logits(2, states).log_softmax(-1)
    return sum(float(scores[position - 1, whole[position]]) for position in range(start, len(whole)))


def test_a_level_in_lm_evals_model_arguments(tiny, data_folder, jumps, data, plain, tmp_path):
    from lm_eval.api.registry import get_model
    from lm_eval.evaluator import evaluate as run

    from layerjump.evaluation.lm_eval import LocalTask

    jumps.save_pretrained(tmp_path / "jumps")
    where = f"pretrained={data_folder / 'tiny-gpt2'},jumps={tmp_path / 'jumps'}"

    def scored(more):
        model = get_model("layerjump").create_from_arg_string(f"{where},{more}", {"batch_size": 1})
        task = {"copa": LocalTask(TASKS["copa"], load_items(TASKS["copa"], data))}
        samples = run(model, task, bootstrap_iters=0)["samples"]["copa"]
        return [[pair[0] for pair in sample["filtered_resps"]] for sample in samples]

    assert scored(f"level={tiny.n_blocks}") == likelihoods(plain)["copa"]
    early = evaluate(tiny, "copa", data, variant=EarlyExitModel(jumps, "fixed:2"))
    assert scored("level=2") == likelihoods(early)["copa"]


def test_every_position_has_its_own_exit_level(tiny, jumps, data, plain):
    """With a rule between never and always, the batch size does not change the exit levels."""
    evaluation = evaluate(tiny, "arc_easy", data, variant=EarlyExitModel(jumps, "maxprob:0.3@1,3"))
    assert 1 < evaluation.mean_level < tiny.n_blocks
    batched = evaluate(tiny, "arc_easy", data, variant=EarlyExitModel(jumps, "maxprob:0.3@1,3"), batch_size=5)
    assert batched.mean_level == evaluation.mean_level
    assert likelihoods(evaluation) != {"arc_easy": likelihoods(plain)["arc_easy"]}


def test_generation_uses_early_exit(tiny, jumps):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from layerjump.evaluation.lm_eval import LayerjumpLM

    def written(model):
        request = ("Once upon a time", {"until": ["\n"], "max_gen_toks": 8, "do_sample": False})
        return model.generate_until([Instance("generate_until", {}, request, 0)], disable_tqdm=True)

    whole = written(HFLM(tiny.hf, tokenizer=tiny.tokenizer))
    assert written(LayerjumpLM(tiny, jumps=jumps, exit="maxprob:1.1")) == whole
    early = written(LayerjumpLM(tiny, jumps=jumps, exit="fixed:1"))
    generated = lj.generate(tiny, jumps, "Once upon a time", exit="fixed:1", max_new_tokens=8)
    assert early == [generated.text[0].split("\n")[0]]


def test_parts_are_replaced_and_restored(tiny, data, plain):
    pairs = "2.ffn.in:2.ffn.out,3.ffn.in:3.ffn.out"
    maps = lj.fit(tiny, stories(200), pairs=pairs, tokens=6_000)
    evaluation = evaluate(tiny, "copa", data, variant=LinearizedModel(maps, "ffn", (2, 3)))
    with lj.linearize(tiny, maps, parts="ffn", blocks=[2, 3]):
        inside = evaluate(tiny, "copa", data)
    assert evaluation.items == inside.items
    assert evaluation.items["copa"] != plain.items["copa"]
    assert evaluate(tiny, "copa", data).items["copa"] == plain.items["copa"]


def test_a_pruned_folder_with_linear_replacements(tiny, data, tmp_path):
    pruned = lj.prune(tiny, stories(200), drop=1, method="linear", criterion="deepest", tokens=6_000)
    pruned.save(tmp_path / "linear")
    evaluation = evaluate(lj.load(tmp_path / "linear"), "copa,lambada", data)
    assert evaluation.items == evaluate(pruned.model, "copa,lambada", data).items


def test_truncated_requests_are_counted(tiny, data, tmp_path):
    folder = write_questions(tmp_path)
    long = {**LINES["copa.jsonl"][0], "query": "Lily was sad. " * 60 + "She cried, because"}
    (folder / "copa.jsonl").write_text(json.dumps(long))
    assert evaluate(tiny, "copa", folder).truncated == 2


def test_the_tokenizer_is_not_changed(tiny, data):
    before = tiny.tokenizer.pad_token
    evaluate(tiny, "copa", data, limit=1)
    assert tiny.tokenizer.pad_token == before


def test_progress_counts_requests(tiny, data):
    scored = []
    evaluate(tiny, "copa", data, progress=lambda done, total: scored.append((done, total)))
    assert scored == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_wilsons_interval():
    low, high = wilson_interval(0.0, 5)
    assert low == pytest.approx(0, abs=1e-12)
    assert high == pytest.approx(0.4345, abs=1e-4)  # 5 items, none right: the textbook's value
    assert wilson_interval(0.5, 10**6) == pytest.approx((0.49902, 0.50098), abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exit": "soon"}, "gap:0.9"),
        ({"exit": "fixed:9"}, "level 9"),
        ({"level": 9}, "level 9"),
        ({"exit": "never", "parts": "attn"}, "pass only one of"),
        ({"parts": "attn"}, "without maps"),
        ({"blocks": "2"}, "pass parts"),
    ],
)
def test_bad_settings_are_refused(tiny, settings, message):
    with pytest.raises(LayerjumpError, match=message):
        make_variant(tiny, **settings).make_reader(tiny)


def test_blocks_are_numbers_and_ranges(tiny, jumps):
    assert parse_blocks("3-5,1") == (3, 4, 5, 1)
    with pytest.raises(BadEvaluation, match="3-5"):
        parse_blocks("three")
    with pytest.raises(BadEvaluation, match="neither an exit rule nor parts"):
        make_variant(tiny, jumps=jumps)
    assert make_variant(tiny) == WholeModel()


def test_an_encoder_is_refused(data_folder, data):
    with pytest.raises(BadEvaluation, match="masked model"):
        evaluate(lj.load(data_folder / "tiny-bert"), "copa", data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 1 of .* is not JSON"),
        ('["a"]', "expected an object .*in row 1 of"),
        ('{"query": "a", "choices": ["b", "c"]}', "a number in `gold`, got nothing"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "there are 2 choices"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "expected a number"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "two texts or more"),
        ('{"query": "a", "choices": ["b", 7], "gold": 0}', "two texts or more"),
        ('{"query": 3, "choices": ["b", "c"], "gold": 0}', "expected a text"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "expected a text to predict"),
        ("", "holds no items"),
    ],
)
def test_bad_task_files_are_refused(tmp_path, line, message):
    (tmp_path / "piqa.jsonl").write_text(line)
    with pytest.raises(LayerjumpError, match=message):
        load_items(TASKS["piqa"], tmp_path)


def test_unknown_labels_are_refused(tmp_path):
    folder = write_questions(tmp_path)
    row = {"premise": "a", "hypothesis": "b", "label": "perhaps"}
    (folder / "superglue/CB/val.jsonl").write_text(json.dumps(row))
    with pytest.raises(BadEvaluation, match="entailment or contradiction or neutral"):
        load_items(TASKS["cb"], folder)
    assert [task.name for task in select_tasks("piqa, copa,piqa")] == ["piqa", "copa"]


def test_the_network_is_not_used(tiny, data, monkeypatch):
    import socket

    def refuse(*_):
        raise AssertionError("something looked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert evaluate(tiny, "all", data, limit=1).scores
