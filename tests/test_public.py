"""The public surface: what is exported is documented, and the README's example runs."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import layerjump as lj

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_exists_and_is_documented():
    for name in lj.__all__:
        thing = getattr(lj, name)
        assert (thing.__doc__ or "").strip(), name
    assert lj.__all__ == sorted(lj.__all__)


def test_importing_the_package_imports_nothing_heavy():
    code = "import layerjump, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(lj, "no_such_name")


def test_the_readmes_example_runs(data_folder, tmp_path):
    """The example as printed, but on the repository's own small model in place of the built-in one."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks[0].strip().splitlines()) <= 12
    for block in blocks:
        code = block.replace('"smollm2"', repr(str(data_folder / "tiny-gpt2")))
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=300)


def test_the_readme_states_the_two_commands_first():
    text = (ROOT / "README.md").read_text()
    assert text.index("make demo") < text.index("```python")
    assert "make test" in text


def test_public_functions_spell_out_their_keywords():
    for name in lj.__all__:
        function = getattr(lj, name)
        # `generate` passes keywords on to Hugging Face's `generate`.
        if inspect.isfunction(function) and name != "generate":
            kinds = {p.kind for p in inspect.signature(function).parameters.values()}
            assert inspect.Parameter.VAR_KEYWORD not in kinds, name


def test_library_errors_name_no_options_of_the_command_line():
    """`errors.argument` names a Python argument, which the command line shows as its option."""
    source = ROOT / "src" / "layerjump"
    quoted = []
    for path in source.rglob("*.py"):
        if path.is_relative_to(source / "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and re.search(r"(?<!\w)--[a-z]", ast.unparse(node)):
                quoted.append(f"{path.relative_to(source)}:{node.lineno}")
    assert quoted == []


def test_lines_of_the_readme_fit():
    assert max(map(len, (ROOT / "README.md").read_text().splitlines())) <= 120
