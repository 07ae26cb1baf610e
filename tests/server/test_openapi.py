"""The server conforms to its OpenAPI description; schemathesis generates the requests.

`make soak` generates more: EXAMPLES=1000 of each kind.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import schemathesis
from helpers.server_process import serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks

DATA = Path(__file__).parents[1] / "fixtures"
EXAMPLES = int(os.environ.get("EXAMPLES", "30"))
SETTINGS = settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))
CHECKS = [checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
REAL = {"model": "tiny-gpt2", "lens": "identity", "lenses": ["identity"], "max_new_tokens": 2}


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    with serving(DATA / "tiny-gpt2", home=tmp_path_factory.mktemp("home")) as running:
        yield schemathesis.openapi.from_url(f"{running.url}api/openapi.json")
        assert running.process.poll() is None
        assert running.ask("/api/healthz")[0] == 200


def asked(operation, ask):
    """Call `ask` with cases of an operation, those that its description allows and others."""
    made = st.one_of(operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    SETTINGS(given(case=made)(ask))()


def test_answers_conform_to_the_description(described):
    """No 500, no status or content that is not described, nothing answered that the description rules out.

    What it allows may still be refused: a rule in words, a token that is two, 3.0 for 3.
    """

    def ask(case):
        response = case.call(timeout=60)
        if response.status_code != 413:  # large positions that are none: schemathesis does not expect this refusal
            case.validate_response(response, excluded_checks=[checks.positive_data_acceptance])

    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) == 9
    for operation in operations:
        asked(operation, ask)


def test_requests_that_reach_the_model_conform_to_the_description(described):
    """A name that is made up is no model's: here the names are real, and texts, rules and tokens are made up."""

    def ask(case):
        if isinstance(case.body, dict):
            case.body = case.body | {name: REAL[name] for name in REAL.keys() & case.body.keys()}
        case.call_and_validate(timeout=60, checks=CHECKS)

    for path in ("/api/lens", "/api/explain", "/api/race", "/api/generate", "/api/load"):
        asked(described[path]["POST"], ask)
