"""`python -m layerjump.evaluation …` is lm-eval's own command line with the model `layerjump` known to it.

lm-eval looks for models in its own table alone, so ours is registered by importing it.
"""

import sys

from layerjump.errors import LayerjumpError
from layerjump.evaluation.lm_eval import require_lm_eval


def main() -> None:
    """Register the model, then hand over."""
    try:
        require_lm_eval()
        from lm_eval.__main__ import cli_evaluate

        import layerjump.evaluation.lm_eval_model  # noqa: F401

        cli_evaluate()
    except LayerjumpError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
