"""The collection that ships with memplan, and a few of its rows against their measurements."""

from pathlib import Path

import pytest
from memplan.planner.trace.source import TraceSource
from memplan.validator.accuracy_rows import read_rows
from memplan.validator.accuracy_score import score_row
from memplan.validator.published.profiles import PROFILES

HERE = Path(__file__).parents[2]
OWN = HERE / "validator" / "published" / "rows.jsonl"
SHARED = HERE.parent / "shared" / "measurements" / "published.jsonl"


@pytest.fixture(scope="module")
def rows():
    return {row.id: row for row in read_rows(OWN)[0]}


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


def test_every_line_of_the_collection_is_a_row():
    rows, problems = read_rows(OWN)

    assert not problems
    assert len(rows) > 1000


def test_every_row_names_where_it_is_from(rows):
    assert all(row.source.ref for row in rows.values())


def test_every_profile_is_of_a_source_in_the_collection(rows):
    assert set(PROFILES) <= {name for row in rows.values() for name in (row.source.name, row.group)}


def test_the_collection_says_what_was_collected(rows):
    if not SHARED.exists():
        pytest.skip("the collection that this one was made from is not here")
    given, problems = read_rows(SHARED)

    assert not problems
    assert {r.id: r.measured for r in given} == {i: r.measured for i, r in rows.items()}


# Rows of every kind of model class in `published`, small enough to trace in seconds.
@pytest.mark.parametrize(
    ("row_id", "within"),
    [
        ("snap-005-0-alloc", 0.001),  # cs336, the first step
        ("snap-064-0-alloc", 0.01),  # cs336_niu
        ("liger-cross_entropy-liger-V4096", 0.001),  # loss_heads, in place
        ("liger-cross_entropy-huggingface-V4096", 0.001),
        ("liger-fused_linear_cross_entropy-liger-BT4096", 0.01),
        ("liger-fused_linear_cross_entropy-huggingface-BT4096", 0.001),
        ("rasbt-vitl-03-bf16true", 0.02),  # torchvision_vit
        ("rasbt-vitl-05-ga", 0.01),  # an optimizer of torch before 2.1: two lists beside the parameters
        ("cs336-damek-infer-fp32-512", 0.001),  # cs336 of 2025, with the course's loss
        ("cs336-damek-train-bf16-256", 0.003),  # one step of the optimizer ends the run
        ("hfdoc-bertlarge-bs4-fp32", 0.02),  # older_torch
        ("fms-a100_80gb-004", 0.01),  # language_models: shifted logits, a cache despite checkpoints
        ("fms-a100_80gb_granite-008", 0.02),  # language_models: a loss in place
        ("fms-a100_80gb-003", 0.002),  # FSDP1 of accelerate on two GPUs, all in bf16
        ("titan-h100-8b-8gpu-eager", 0.05),  # torchtitan_llama: FSDP2 on eight GPUs, reserved
        ("titan-h100-8b-128gpu-eager", 0.05),
        ("cs336-wedsonlin-ddp", 0.002),  # gradients averaged where they lie
        ("hfdoc-bertlarge-bs4-adam8bit", 0.005),  # an optimizer of bitsandbytes
        ("litgpt-rt-06", 0.001),  # litgpt: its own LoRA, logits that Fabric widens and the loop holds
        ("litgpt-rt-03", 0.002),  # a 4-bit base, unpacked in fp16 and copied
        ("litgpt-rt-11", 0.001),  # an RMSNorm that widens its input
        ("peft-math-lora--llama-3.2-3B-rank32-alloc", 0.001),  # a mean over batches, with the cache that outputs hold
    ],
)
def test_a_published_class_predicts_its_run(rows, traces, row_id, within):
    scored = score_row(rows[row_id], traces)

    assert scored.expressed, scored.reason
    assert scored.ratio == pytest.approx(1, abs=within)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row_id", "within"),
    [
        ("fms-a100_80gb_liger-034", 0.001),  # fp32 shards, all else narrow
        ("fms-a100_80gb_liger-066", 0.01),  # four GPUs
        ("litgpt-rt-37", 0.002),  # frozen and trained parameters in one unit; the first micro step is the largest
        ("litgpt-rt-42", 0.02),  # a later one is, whose length is not known
        ("fms-a100_80gb_granite-005", 0.002),
        ("fms-a100_80gb_liger-054", 0.01),  # QLoRA: frozen units inside reentrant checkpoints hold inputs and gradients
    ],
)
def test_fsdp1_predicts_its_run(rows, traces, row_id, within):
    assert score_row(rows[row_id], traces).ratio == pytest.approx(1, abs=within)


@pytest.mark.slow
@pytest.mark.parametrize("row_id", ["fms-a100_80gb-027", "fms-a100_80gb_liger-035", "fms-a100_80gb_liger-068"])
def test_what_ran_out_of_memory_on_several_gpus_is_predicted_to(rows, traces, row_id):
    assert score_row(rows[row_id], traces).verdict == "does_not_fit"


@pytest.mark.slow
def test_recomputing_more_blocks_at_once_needs_more(rows, traces):
    peaks = [score_row(rows[f"cs336-enzo-ckpt-512-k{k}"], traces) for k in (1, 4, 16)]

    assert [round(p.ratio, 2) for p in peaks] == [1.0, 1.0, 1.0]
    assert peaks[0].predicted_bytes < peaks[1].predicted_bytes < peaks[2].predicted_bytes


@pytest.mark.slow
def test_a_bare_colon_was_a_slice_whose_gradient_takes_a_block_of_the_logits_size(rows, traces):
    predicted, measured = score_row(rows["fms-a100_80gb_liger-027"], traces).phases["nvidia_smi_minus_idle"]

    assert predicted == pytest.approx(measured, rel=0.02)  # a fifth less without it
