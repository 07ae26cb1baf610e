"""What a run with `--protocol paper` does otherwise than the authors did, so that a report can say so."""

from __future__ import annotations

from layerjump.studies.setup import PAPER_SETTINGS, Setup

FAMILIES = ("gpt2", "bert")
FIT_SENTENCES, TEST_SENTENCES = 9_000, 3_000
MAX_LENGTH = {"gpt2": 1024}
OURS = 512


def differences(setup: Setup) -> list[str]:
    """Sentences, one a difference; none for a run that does not follow the paper."""
    settings, model = setup.settings, setup.model
    if not settings.paper:
        return []
    family, said = model.hf.config.model_type, []
    if family not in FAMILIES:
        said.append(f"The model is of the family {family}; the paper's are GPT-2 and BERT.")
    said.append(
        f"The text is {setup.corpus.name}; the paper's are Wikipedia (20220301.en, a paragraph's last sentence) and "
        f"news of the Leipzig collection."
    )
    parts = setup.parts()
    if len(parts.fit) != FIT_SENTENCES:
        said.append(f"{len(parts.fit):,} sentences were for fitting; in the paper 9,000.")
    if len(parts.test) != TEST_SENTENCES:
        said.append(
            f"{len(parts.test):,} sentences were for testing; in the paper 3,000 (1,000 of the news)."
        )
    if settings.tokens is not None:
        said.append(f"Only {settings.tokens:,} tokens were run; the paper sets no such bound.")
    if settings.positions != PAPER_SETTINGS.positions:
        said.append(f"Positions are {settings.positions}; in the paper one a sentence.")
    if settings.estimators != PAPER_SETTINGS.estimators:
        said.append(f"Maps are {', '.join(settings.estimators)}; the paper's is mat.")
    if not model.masked and model.tokens.around[0]:
        said.append("A special token begins every text; the paper's GPT-2 sees none.")
    longest = MAX_LENGTH.get(family, OURS)
    if longest > OURS:
        said.append(f"Sentences are cut at {OURS} tokens; in the paper at {longest:,}.")
    said.append("Splits and positions are drawn with a seed of ours; the authors set none.")
    return said
