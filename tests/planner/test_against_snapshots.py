"""A step predicted op by op against recordings: of real runs (a folder beside the repository), and of simulated ones."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.__main__ import main
from memplan.planner.against import Against, against
from memplan.planner.alignment import aligned
from memplan.planner.allocator.snapshot import Snapshot, read_snapshot
from memplan.planner.allocator_cli import predicts
from memplan.planner.api import make_request
from memplan.planner.export import write_run
from memplan.planner.predict import ledger_of
from memplan.planner.request import Request
from memplan.planner.trace.source import TraceSource

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT.parent / "shared" / "snapshots"
DECODER = ROOT / "validator" / "published" / "cs336.py"
needs_recordings = pytest.mark.skipif(not FOLDER.exists(), reason="the recordings are not here")

# -- real runs ---------------------------------------------------------------------------------------------------------

SIZES = {  # hidden, intermediate, layers, heads
    "medium": (1024, 4096, 24, 16), "large": (1280, 5120, 36, 20), "xl": (1600, 6400, 48, 25), "2.7B": (2560, 10240, 32, 32),
}  # fmt: skip


# (recording, tokens, precision) of one author's runs: step 6 of a training, and a forward pass in inference mode
AUTHOR_TRAINS = [("074", 128, "fp32"), ("080", 256, "fp32"), ("077", 512, "bf16-autocast"), ("079", 1024, "bf16-autocast")]
AUTHOR_INFERS = [("078", 128, "fp32"), ("081", 256, "fp32"), ("076", 512, "bf16-autocast"), ("075", 1024, "fp32")]


def decoder(size: str, gpu: str, *, seq: int, full_slices: bool = False, edition: int = 2025, loss: str = "cross-entropy",
            inference_mode: bool = False, keep_outputs: bool = True, **options: Any) -> Request:  # fmt: skip
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: str(value) for name, value in zip(names, SIZES[size], strict=True)}
    run = {"full_slices": full_slices, "edition": edition, "loss": loss, "inference_mode": inference_mode}
    overrides = {**sizes, "max_position_embeddings": str(seq), **{key: str(value).lower() for key, value in run.items()}}
    return make_request(
        f"{DECODER}:build", gpu, overrides=overrides, micro_batch_size=4, seq_len=seq, keep_outputs=keep_outputs, **options
    )


def recording(name: str) -> Snapshot:
    return read_snapshot(FOLDER / f"trace_{name}.json.gz")


@cache
def first_step(name: str, size: str) -> Against:
    """One training step from the start, fp32, torch 2.6; a workspace of 32 MiB says Hopper."""
    request = decoder(size, "h100-sxm-80gb", seq=128, full_slices=True, precision="fp32")
    return against(recording(name), 0, request, TraceSource(exact=True), torch_version="2.6")


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(("name", "size"), [("005", "medium"), ("009", "large"), ("008", "xl"), ("006", "2.7B")])
def test_a_first_step_reaches_its_recorded_peaks(name: str, size: str) -> None:
    found = first_step(name, size)

    assert abs(found.whole.allocated_ratio - 1) <= 0.001
    assert abs(found.whole.reserved_ratio - 1) <= 0.001
    assert predicts(found)


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(("name", "size"), [("005", "medium"), ("009", "large"), ("008", "xl"), ("006", "2.7B")])
def test_every_event_of_a_first_step_is_predicted_in_its_order(name: str, size: str) -> None:
    found = first_step(name, size)

    assert found.differences == ()
    for events in found.events:
        assert events.num_equal == events.num_predicted == events.num_recorded
    for peaks in found.peaks:
        assert (peaks.allocated_ratio, peaks.reserved_ratio) == (1.0, 1.0)


@pytest.mark.slow
@needs_recordings
def test_a_kernel_of_another_version_is_listed_as_a_difference() -> None:
    """Without the slice that `w[ids, :]` still was in torch 2.6, its backward is missing."""
    request = decoder("medium", "h100-sxm-80gb", seq=128, precision="fp32")

    found = against(recording("005"), 0, request, TraceSource(exact=True), torch_version="2.6")

    (missing,) = found.differences
    assert missing.phase == "backward"
    assert missing.only_predicted == ()
    assert missing.only_recorded == ("alloc 40,960,000", "free 40,960,000")


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(("name", "seq", "precision"), AUTHOR_TRAINS)
def test_every_event_of_another_authors_forward_and_backward_is_predicted_in_its_order(
    name: str, seq: int, precision: str
) -> None:
    """Step 6 of a run of the course's edition of 2026, with its loss by hand, torch 2.11: fp32 and bf16 autocast."""
    request = decoder("medium", "a100-sxm-80gb", seq=seq, edition=2026, loss="by-hand", precision=precision)

    found = against(recording(name), 0, request, TraceSource(exact=True), step="later", torch_version="2.11")

    assert found.num_unmatched_frees == 2  # the loop had dropped the logits and the loss of the step before
    for phase, unmatched in (("forward", 2), ("backward", 0)):
        (events,) = (e for e in found.events if e.phase == phase)
        assert events.num_equal == events.num_recorded == events.num_predicted - unmatched
        assert (found.of(phase).allocated_ratio, found.of(phase).reserved_ratio) == (1.0, 1.0)
    assert any(d.phase == "step" for d in found.differences)  # the course has an optimizer of its own


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize(("name", "seq", "precision"), AUTHOR_INFERS)
def test_a_forward_pass_in_inference_mode_is_predicted_event_by_event(name: str, seq: int, precision: str) -> None:
    """Under autocast no cast of a weight is kept there since torch 2.11."""
    request = decoder(
        "medium", "a100-sxm-80gb", seq=seq, edition=2026, loss="none", inference_mode=True,
        precision=precision, mode="inference", keep_outputs=False,
    )  # fmt: skip

    found = against(recording(name), 0, request, TraceSource(exact=True), step="later", torch_version="2.11")

    assert (found.whole.allocated_ratio, found.whole.reserved_ratio) == (1.0, 1.0)
    (events,) = found.events
    assert events.num_equal_allocs == events.num_predicted_allocs == events.num_recorded_allocs
    assert predicts(found)


# -- simulated runs ----------------------------------------------------------------------------------------------------

TINY = {"num_hidden_layers": "3", "hidden_size": "64", "num_attention_heads": "4"}
WORDS = ["--gpu", "a100-sxm-80gb", "--precision", "fp32", "--seq", "64"]
WORDS += [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a small model, simulated from the first allocation on."""
    request = make_request("gpt2", "a100-sxm-80gb", overrides=TINY, seq_len=64, micro_batch_size=2, precision="fp32")
    path = tmp_path_factory.mktemp("run") / "run.pickle"
    write_run(path, ledger_of(request, TraceSource(exact=True).step(request)))
    return path


def test_a_run_predicts_itself_event_by_event(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", str(recorded), "--against-trace", "gpt2", "--step", "later", "--micro-batch", "2", *WORDS, "--json"]

    assert main(words) == 0

    answer = json.loads(capsys.readouterr().out)
    assert answer["differences"] == []
    assert [peaks["phase"] for peaks in answer["peaks"]] == ["all", "init", "forward", "backward", "step"]
    assert all(peaks["allocated_ratio"] == peaks["reserved_ratio"] == 1.0 for peaks in answer["peaks"])
    assert all(events["num_equal"] == events["num_predicted"] == events["num_recorded"] > 0 for events in answer["events"])


def test_another_batch_does_not_agree_and_the_differences_are_listed(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(recorded), "--against-trace", "gpt2", "--step", "later", "--micro-batch", "3", *WORDS]

    assert main(words) == 1

    shown = capsys.readouterr().out
    assert "DOES NOT AGREE within 0.1%" in shown
    assert "only predicted: alloc" in shown
    assert "only recorded: alloc" in shown


def test_what_happens_in_every_block_is_told_once(recorded: Path) -> None:
    request = make_request("gpt2", "a100-sxm-80gb", overrides=TINY, seq_len=64, micro_batch_size=2, precision="fp32")

    found = against(read_snapshot(recorded), 0, request.but(attention="eager"), TraceSource(exact=True), step="later")

    in_blocks = [d for d in found.differences if any("transformer.h.*.attn" in line for line in d.only_predicted)]
    assert in_blocks
    assert max(d.count for d in in_blocks) >= 3


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--seq", "64"], "--seq: describes a predicted step"),
        (["--keep-outputs"], "--keep-outputs: describes a predicted step"),
        (["--against-trace", "gpt2", "--blind"], "--blind: has no meaning with --against-trace"),
        (["--against-trace", "gpt2", "--torch", "new"], "--torch 'new': expected a version"),
        (
            ["--against-trace", "gpt2", "--nodes", "2", *WORDS],
            "--gpus 1 on --nodes 2: the GPUs do not divide over the machines",
        ),
        (["--device", "3"], "has no events of device 3"),
    ],
)
def test_options_that_make_no_sense_together_are_mistakes(
    recorded: Path, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recorded), *words]) == 2
    assert problem in capsys.readouterr().err


# -- alignment ---------------------------------------------------------------------------------------------------------


def longest_common(a: list[int], b: list[int]) -> int:
    """The length of the longest common subsequence, by the textbook's table."""
    row = [0] * (len(b) + 1)
    for x in a:
        corner = 0
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], corner + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


few = st.lists(st.integers(0, 3), max_size=14)


@given(few, few)
def test_an_alignment_pairs_equal_items_in_order_and_as_many_as_can_be_had(a: list[int], b: list[int]) -> None:
    pairs = aligned(a, b)

    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
    assert len(pairs) == longest_common(a, b)


@given(few, few)
def test_an_alignment_that_gives_up_still_pairs_only_equal_items(a: list[int], b: list[int]) -> None:
    pairs = aligned(a, b, max_edits=2)

    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))


def test_where_nothing_is_alike_only_the_beginning_is_compared() -> None:
    same, ours, theirs = [7] * 50, list(range(100, 200)), list(range(200, 300))

    assert aligned(same + ours, same + theirs, max_edits=20) == [(i, i) for i in range(50)]
