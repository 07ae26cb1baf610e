"""The pass over text in several processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers.cli import refused
from helpers.comparisons import same_bytes
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import layerjump as lj
from layerjump.errors import BadModel
from layerjump.jumps.maps import to_affine
from layerjump.jumps.moments_of_splits import read_header

LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def torchrun(n: int, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*LAUNCH, str(n), "-m", "layerjump", "fit", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | ONE_THREAD,
    )


def kill_in_the_middle(n: int, folder: Path, *arguments: str) -> None:
    """Start a run of several processes, and kill one of them with SIGKILL when all have saved sums of their own."""
    before = {path: path.stat().st_mtime_ns for path in folder.glob("unfinished-*")}
    run = subprocess.Popen(
        [*LAUNCH, str(n), "-m", "layerjump", "fit", *arguments, "-o", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_THREAD,
    )

    def is_saved(path: Path) -> bool:
        return path.exists() and path.stat().st_mtime_ns != before.get(path)

    while not all(is_saved(folder / f"unfinished-{rank}-of-{n}.safetensors") for rank in range(n)):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.02)
    for child in psutil.Process(run.pid).children(recursive=True):
        if child.environ().get("RANK") == str(n - 1):
            child.kill()
    _, error = run.communicate(timeout=120)
    assert run.returncode != 0
    assert n == 1 or "--resume" in error
    assert not (folder / "jumps.json").exists()


@pytest.mark.parametrize(("n", "settings"), [(5, ("--pairs", "all")), (2, ("--estimator", "calibrated"))])
def test_any_number_of_processes_gives_the_same_bytes(n, settings, data_folder, tmp_path):
    """Of five processes one holds no sums: there are four sources."""
    for number in (1, n):
        folder = str(tmp_path / str(number))
        done = torchrun(number, str(data_folder / "tiny-gpt2"), *settings, "--tokens", "8000", "-o", folder)
        assert done.returncode == 0, done.stderr
    assert same_bytes(tmp_path / "1", tmp_path / str(n))


def test_one_three_then_two_processes_each_killed_end_in_the_same_bytes(data_folder, tmp_path):
    settings = (str(data_folder / "tiny-gpt2"), "--estimator", "calibrated", "--tokens", "60000")
    settings += ("--checkpoint-seconds", "0")
    assert torchrun(1, *settings, "-o", str(tmp_path / "whole")).returncode == 0
    folder, progress = tmp_path / "elastic", []
    for n in (1, 3, 2):
        kill_in_the_middle(n, folder, *settings, *(["--resume"] if progress else []))
        done = [sum(read_header(path).done.values()) for path in folder.glob(f"unfinished-*-of-{n}.safetensors")]
        assert len(done) == n
        progress.append(min(done))
    assert 0 < progress[0] < progress[1] < progress[2]
    resumed = torchrun(2, *settings, "-o", str(folder), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming after {progress[-1]} batches" in resumed.stderr
    assert same_bytes(tmp_path / "whole", folder)
    assert list(folder.glob("unfinished-*")) == []


@pytest.fixture(scope="module")
def llama(data_folder, tmp_path_factory):
    """A folder with a small random Llama, which transformers can divide among processes."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(data_folder / "tiny-gpt2")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_two_tensor_parallel_copies_equal_one_process(llama, tmp_path):
    """Only sums inside the model are formed in another order: float32 rounding."""
    for n, settings in ((1, ()), (4, ("--tensor-parallel", "2"))):
        done = torchrun(n, llama, "--tokens", "4000", *settings, "-o", str(tmp_path / str(n)))
        assert done.returncode == 0, done.stderr
    one, four = (lj.Jumps.from_pretrained(tmp_path / str(n)) for n in (1, 4))
    assert one.provenance == four.provenance  # the fingerprint too
    for pair in one:
        ours, theirs = (to_affine(jumps[pair]).factors[0] for jumps in (one, four))
        assert (ours - theirs).abs().max() < 1e-5 * ours.abs().max()
        assert one.info[pair].r2 == pytest.approx(four.info[pair].r2, abs=1e-6)


def test_what_several_processes_cannot_do_is_refused_in_one_line(llama, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadModel, match="no device_map='auto' under torchrun"):
        lj.load(llama, device_map="auto")
    with pytest.raises(BadModel, match="tensor_parallel that divides .* got 3 and 2"):
        lj.load(llama, tensor_parallel=3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    error = refused(monkeypatch, capsys, "fit", llama, "--tensor-parallel", "2")
    assert "--tensor-parallel that divides the number of processes, got 2 and 1" in error


def test_processes_that_share_weights_give_the_bytes_of_one(llama, tmp_path):
    """FSDP2; in the last round some processes have no batch of their own, but gather weights with the others."""
    for n, settings in ((1, ()), (3, ("--fully-shard",))):
        done = torchrun(n, llama, "--tokens", "6000", *settings, "-o", str(tmp_path / str(n)))
        assert done.returncode == 0, done.stderr
    assert same_bytes(tmp_path / "1", tmp_path / "3")


OWN_SHARDS = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
import layerjump as lj

dist.init_process_group("gloo")
hf = AutoModelForCausalLM.from_pretrained(sys.argv[1])
mesh = init_device_mesh("cpu", (2,))
for block in hf.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(hf, mesh=mesh)
model = lj.Model.wrap(hf, AutoTokenizer.from_pretrained(sys.argv[1]))
plain = lj.load(sys.argv[1])
ours, theirs = (lj.fit(m, "pydoc", tokens=3_000, estimator="calibrated") for m in (model, plain))
assert ours.provenance.fingerprint == theirs.provenance.fingerprint
for pair in theirs:
    assert all(map(torch.equal, ours[pair].parameters(), theirs[pair].parameters()))
assert torch.equal(*(lj.Lens(m, theirs)("def f(x): return").top for m in (model, plain)))
texts = [lj.generate(m, theirs, "def", max_new_tokens=4).ids for m in (model, plain)]
assert texts[0] == texts[1]
assert all(hasattr(block.mlp.up_proj.weight, "full_tensor") for block in hf.model.layers)  # each holds its part alone
try:
    lj.prune(model, "pydoc", drop=1, tokens=3_000)
except lj.errors.BadPruning as error:
    assert "FSDP2" in str(error)
else:
    raise AssertionError("pruned a model of which each process holds a part")
print("as one process")
dist.destroy_process_group()
"""


def test_a_fully_sharded_model_is_fitted_and_read_as_a_whole_one(llama, tmp_path):
    (tmp_path / "own_shards.py").write_text(OWN_SHARDS)
    done = subprocess.run(
        [*LAUNCH, "2", str(tmp_path / "own_shards.py"), llama],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | ONE_THREAD,
    )
    assert done.stdout.count("as one process") == 2, done.stderr


def test_sharing_weights_needs_several_processes(llama, monkeypatch, capsys):
    error = refused(monkeypatch, capsys, "fit", llama, "--fully-shard")
    assert "expected processes of torchrun to share the model with --fully-shard" in error
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadModel, match="tensor_parallel or fully_shard=True, got both"):
        lj.load(llama, tensor_parallel=2, fully_shard=True)
