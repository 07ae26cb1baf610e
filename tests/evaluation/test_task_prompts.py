"""The prompts of our tasks equal those of lm-eval's own task files."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerjump.evaluation.tasks import TASKS

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")

# Task → lm-eval's file, an item of the hub's dataset, and the same item in our file format.
CASES = {
    "arc_easy": (
        "arc/arc_easy.yaml",
        {
            "question": "Which of these is alive?",
            "choices": {"text": ["a stone", "a dog"], "label": ["A", "B"]},
            "answerKey": "B",
        },
        {"query": "Question: Which of these is alive?", "choices": ["a stone", "a dog"], "gold": 1},
    ),
    "boolq": (
        "super_glue/boolq/default.yaml",
        {"passage": "Ants -- small.", "question": "are ants small", "label": 1},
        {"query": "Passage: Ants -- small.\nQuestion: are ants small?", "choices": ["no", "yes"], "gold": 1},
    ),
    "cb": (
        "super_glue/cb/default.yaml",
        {"premise": "It {{rained}}.", "hypothesis": "it was dry", "label": 1},
        {"premise": "It {{rained}}.", "hypothesis": "it was dry", "label": "contradiction"},
    ),
    "copa": (
        "super_glue/copa/default.yaml",
        {
            "premise": "The man, who was tall, fell.",
            "choice1": "He slept.",
            "choice2": "He slipped.",
            "question": "cause",
            "label": 1,
        },
        {"query": "The man, who was tall, fell, because", "choices": ["he slept.", "he slipped."], "gold": 1},
    ),
    "lambada": (
        "lambada/lambada_openai.yaml",
        {"text": "She took the dog\n\nand went  home"},
        {"text": "She took the dog\n\nand went  home"},
    ),
    "piqa": (
        "piqa/piqa.yaml",
        {"goal": "dry a hat", "sol1": "the lake", "sol2": "the sun", "label": 1},
        {"query": "Question: dry a hat\n", "choices": ["the lake", "the sun"], "gold": 1},
    ),
    "rte": (
        "super_glue/rte/default.yaml",
        {"premise": "It rained.", "hypothesis": "It was wet.", "label": 0},
        {"premise": "It rained.", "hypothesis": "It was wet.", "label": "entailment"},
    ),
    "winograd": (
        "wsc273/default.yaml",
        {
            "text": "The toy is not in the box because it is small.",
            "pronoun": "it",
            "pronoun_loc": 34,
            "options": ["The toy", "The box"],
            "label": 1,
        },
        {
            "context_options": [
                "The toy is not in the box because the toy",
                "The toy is not in the box because the box",
            ],
            "continuation": "is small.",
            "gold": 1,
        },
    ),
    "winograd at the end": (
        "wsc273/default.yaml",
        {
            "text": "Tom saw Ben and called him.",
            "pronoun": "him",
            "pronoun_loc": 23,
            "options": ["Tom", "Ben"],
            "label": 1,
        },
        {
            "context_options": ["Tom saw Ben and called Tom", "Tom saw Ben and called Ben"],
            "continuation": ".",
            "gold": 1,
        },
    ),
}


def requests(task) -> list:
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args for instance in task.instances]


@pytest.mark.parametrize("name", CASES)
def test_prompts_and_answers_equal_lm_eval(name):
    import datasets
    import lm_eval.tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    from layerjump.evaluation.lm_eval import LocalTask

    file, hub, line = CASES[name]
    config = load_yaml(Path(lm_eval.tasks.__file__).parent / file)
    task = TASKS[name.split()[0]]

    class Theirs(ConfigurableTask):
        def download(self, *_, **__):
            rows = datasets.Dataset.from_list([hub])
            self.dataset = dict.fromkeys(("train", "validation", "test"), rows)

    theirs = Theirs(config={**config, "num_fewshot": 0})
    ours = LocalTask(task, [task.parse(line)])
    assert config["task"] == task.lm_eval_name
    assert requests(ours) == requests(theirs)
    assert sorted(ours.aggregation()) == sorted(theirs.aggregation())
    likelihoods = [(-1.0, False), (-2.0, True), (-3.0, False)][: len(ours.instances)]
    for answers in (likelihoods, likelihoods[::-1]):
        results = [task.process_results(task.eval_docs[0], answers) for task in (ours, theirs)]
        assert results[0] == results[1]


def test_f1_is_the_mean_over_three_answers():
    from lm_eval.tasks._yaml_loader import load_yaml

    from layerjump.evaluation.tasks import macro_f1

    folder = Path(lm_eval.__file__).parent / "tasks"
    theirs = load_yaml(folder / "super_glue/cb/default.yaml")["metric_list"][1]["aggregation"]
    pairs = [(0, 0), (0, 1), (1, 1), (2, 0), (1, 1), (0, 0)]
    assert macro_f1(pairs) == pytest.approx(theirs(pairs))
    assert macro_f1(pairs, [2, 1, 1, 1, 1, 1]) == pytest.approx(theirs([pairs[0], *pairs]))
