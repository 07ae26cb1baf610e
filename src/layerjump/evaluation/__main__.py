"""`python -m layerjump.evaluation …`: lm-eval's own command line, with the model `layerjump` registered."""

import sys

from layerjump.errors import LayerjumpError
from layerjump.evaluation.tasks import require_lm_eval


def main() -> None:
    """Register the model and run lm-eval's command line."""
    try:
        require_lm_eval()
        from lm_eval.__main__ import cli_evaluate

        import layerjump.evaluation.lm_eval  # noqa: F401  (registers the model)

        cli_evaluate()
    except LayerjumpError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
