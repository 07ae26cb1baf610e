"""The registry of estimators: every row can be used, and reading it costs nothing."""

import inspect
import subprocess
import sys

import pytest

import layerjump as lj
from layerjump.errors import BadEstimator
from layerjump.jumps.estimators.registry import CLOSED_FORM, ESTIMATORS, EstimatorSettings, find_estimator


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_row_names_a_function_that_takes_its_settings(name):
    estimator = ESTIMATORS[name]
    parameters = inspect.signature(estimator.load()).parameters
    if estimator.scope == "run":
        assert list(parameters) == ["moments", "settings", "model"]
    else:
        assert set(estimator.settings) <= set(parameters)


def test_the_documentation_of_fit_names_every_closed_form_estimator_and_keyword():
    words = inspect.getdoc(lj.fit)
    assert all(name in words for name in CLOSED_FORM)
    assert all(f"{name}: " in words for name in inspect.signature(lj.fit).parameters)


def test_reading_the_registry_does_not_import_torch():
    code = "import layerjump.jumps.estimators.registry, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_are_recorded_under_the_names_of_the_file_format():
    assert EstimatorSettings(strength=0.5, rank=3).on_disk() == {"strength": 0.5, "rank": 3}
    assert EstimatorSettings(ojfa_pooling="best-level").on_disk() == {"how": "best-level"}
    assert EstimatorSettings(keep_both_targets=True).on_disk() == {"how": "to-tune"}


def test_an_estimator_by_gradients_is_not_solved_from_moments():
    assert find_estimator("jacobian").reads_text
    with pytest.raises(BadEstimator, match=r"call lj\.fit_jacobian"):
        find_estimator("jacobian", closed_form=True)


def test_a_strength_of_zero_is_a_setting():
    assert EstimatorSettings(strength=0.0).non_defaults() == {"strength": 0.0}
