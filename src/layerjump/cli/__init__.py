"""The command line. Nothing heavy is imported until a command needs it."""

from layerjump.cli.main import main as main
