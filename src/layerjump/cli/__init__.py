"""The command line: parse, call one function, print. Nothing heavy is imported until a command needs it."""

from layerjump.cli.app import main as main
