"""`python -m layerjump`: the command line (also under `torchrun -m layerjump`)."""

from layerjump.cli import main

main()
