import copy
import json

import pytest
from memplan.__main__ import main
from memplan.errors import CannotTell, UserError
from memplan.planner.trace.source import TraceSource
from memplan.planner.trace.steptrace import Phase
from memplan.validator.accuracy_models import spec_of, version_of
from memplan.validator.accuracy_question import question_of
from memplan.validator.accuracy_report import as_page
from memplan.validator.accuracy_rows import Row, read_rows
from memplan.validator.accuracy_score import Scored, micro_step, score, score_row
from memplan.validator.accuracy_summary import ALL, summarise
from memplan.validator.accuracy_where import select

GiB = 2**30
TINY = {
    "id": "tiny",
    "source": {"name": "somebody", "ref": "somebody/something@1"},
    "hardware": {"gpu": "a100-80gb", "gpu_memory_gib": 80.0, "num_gpus": 1},
    "model": {
        "ref": "somebody/tiny",
        "family": "llama",
        "config": {
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "tie_word_embeddings": False,
        },
    },
    "workload": {
        "task": "causal-lm",
        "phase": "train",
        "micro_batch": 2,
        "seq_len": 64,
        "grad_accum": 1,
        "padded_or_packed": "packed",
    },
    "strategy": {
        "method": "full",
        "precision": {"param_dtype": "bf16", "autocast": "none"},
        "optimizer": {"name": "adamw", "impl": "foreach"},
        "parallel": {"kind": "single", "dp": 1, "tp": 1, "pp": 1, "cp": 1},
        "offload": {},
        "attention": "sdpa",
        "loss": "standard",
    },
    "measured": {"metric": "allocated_peak", "bytes": 10_000_000},
    "completeness": "A",
}


def tiny(**changes):
    """The data of a row; `strategy__loss=...` changes a nested value."""
    data = copy.deepcopy(TINY)
    for path, value in changes.items():
        *parents, key = path.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        place[key] = value
    return data


def row(**changes):
    return Row.model_validate(tiny(**changes))


@pytest.fixture
def written(tmp_path):
    def write(*lines):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return file

    return write


# -- rows ----------------------------------------------------------------------------------------------------------------


def test_a_broken_line_is_named_with_its_field_and_the_others_are_read(written):
    rows, problems = read_rows(written(tiny(), tiny(id="b", workload__micro_batch=0), tiny(id="c")))

    assert [r.id for r in rows] == ["tiny", "c"]
    assert str(problems[0]) == "line 2, workload.micro_batch: expected greater than or equal to 1, got 0"


def test_an_unknown_field_is_an_error(written):
    _, problems = read_rows(written(tiny(strategy__los="standard")))

    assert str(problems[0]) == "line 1, strategy.los: is no field of a row"


def test_a_missing_field_is_an_error(written):
    data = tiny()
    del data["workload"]["seq_len"]

    assert str(read_rows(written(data))[1][0]) == "line 1, workload.seq_len: is missing"


def test_a_misspelt_architecture_key_is_an_error_with_a_proposal(written):
    _, problems = read_rows(written(tiny(model__config={"hiden_size": 64})))

    assert "hiden_size" in str(problems[0])
    assert "Did you mean hidden_size" in str(problems[0])


def test_a_number_in_quotes_is_an_error(written):
    assert "expected a valid integer" in str(read_rows(written(tiny(measured__bytes="12")))[1][0])


def test_a_line_that_is_no_json_is_named_with_its_column(written):
    assert str(read_rows(written(tiny(), "{oops"))[1][0]).startswith("line 2: not valid JSON at column 2")


def test_two_rows_of_one_id_are_an_error(written):
    rows, problems = read_rows(written(tiny(), tiny()))

    assert len(rows) == 1
    assert str(problems[0]) == "line 2, id: 'tiny' is the id of line 1 too"


@pytest.mark.parametrize("metric", ["fits", "oom"])
def test_a_verdict_carries_no_bytes(written, metric):
    assert "carry no bytes" in str(read_rows(written(tiny(measured__metric=metric)))[1][0])


def test_ranks_that_do_not_multiply_to_the_gpus_are_an_error(written):
    assert "num_gpus is 2" in str(read_rows(written(tiny(hardware__num_gpus=2)))[1][0])


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "no.jsonl")


# -- which rows ------------------------------------------------------------------------------------------------------------


def test_where_takes_short_names_paths_and_alternatives():
    rows = [row(), row(id="b", source__name="other"), row(id="c", strategy__attention="eager")]

    assert [r.id for r in select(rows, ["source=somebody"])] == ["tiny", "c"]
    assert [r.id for r in select(rows, ["strategy.attention=eager"])] == ["c"]
    assert [r.id for r in select(rows, ["id=tiny,b", "source=other"])] == ["b"]


def test_where_refuses_a_key_that_rows_do_not_have():
    with pytest.raises(UserError, match=r"no such key.*Did you mean"):
        select([row()], ["strategy.atention=eager"])


# -- from a row to a question ------------------------------------------------------------------------------------------------


def test_what_a_row_says_is_what_is_asked():
    request = question_of(row(workload__grad_accum=4, strategy__recompute="full", strategy__optimizer__impl="fused")).request

    assert (request.micro_batch_size, request.seq_len, request.precision) == (2, 64, "bf16")
    assert (request.optimizer, request.optimizer_impl, request.recompute) == ("adamw", "fused", "full")
    assert request.loop.grad_accum_steps == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy__precision__master_weights": "fp32"}, "master weights"),
        ({"strategy__optimizer__name": "no-such-optimizer"}, "optimizer no-such-optimizer"),
        ({"strategy__offload": {"param": "cpu"}}, "offload"),
        ({"strategy__compile": True}, "torch.compile"),
        ({"strategy__loss": "chunked"}, "loss chunked"),
        ({"hardware__gpu": "abacus"}, "not in the catalogue"),
        ({"model__family": "timm"}, "timm"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes, reason):
    with pytest.raises(CannotTell, match=reason):
        question_of(row(**changes))


def test_the_memory_on_the_box_is_not_what_a_card_has():
    verdict = {"measured": {"metric": "fits"}, "hardware__gpu_memory_gib": 80.0}

    assert question_of(row(**verdict)).request.device.total_bytes < 80 * GiB


def test_a_memory_that_the_source_read_is_taken_as_it_is():
    request = question_of(row(measured={"metric": "fits"}, hardware__gpu_memory_gib=79.1)).request

    assert request.device.total_bytes == int(79.1 * GiB)


def test_the_version_is_read_from_the_software_of_a_row():
    assert version_of(row(software="SFTTrainer; torch 2.4.1, transformers 4.48.1"), "transformers") == (4, 48)
    assert version_of(row(software="SFTTrainer; torch 2.4.1, transformers 4.48.1"), "torch") == (2, 4)
    assert version_of(row(software="somebody's own"), "torch") is None


def test_a_nightly_build_counts_as_the_version_before_its_own():
    assert version_of(row(software="torch 2.1.0.dev20230623"), "torch") == (2, 0)
    assert version_of(row(software="torch 2.1.0, transformers 4.31"), "torch") == (2, 1)


@pytest.mark.parametrize(
    ("software", "impl", "assumed", "expected"),
    [
        ("torch 2.1.0.dev", "foreach", [], "foreach-2.0"),
        ("torch 2.0.1", "unknown", [], "foreach-2.0"),
        ("torch 2.4.1", "foreach", [], "foreach"),
        ("torch 1.13.1", "unknown", [], "for-loop"),
        ("torch 1.13.1", "foreach", ["AdamW foreach (torch default)"], "for-loop"),
        ("torch 1.13.1", "foreach", [], "foreach-2.0"),
    ],
)
def test_an_optimizer_steps_as_the_rows_torch_did(software, impl, assumed, expected):
    asked = question_of(row(software=software, strategy__optimizer__impl=impl, assumed=assumed)).request

    assert asked.optimizer_impl == expected


CS336 = {
    "model__family": "custom",
    "model__config": {"custom_class": "cs336", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2},
    "source__name": "cs336-wedsonlin",
    "strategy__optimizer__impl": "for-loop",
}


@pytest.mark.parametrize(
    ("phase", "loss_fn", "expected"),
    [
        ("train", "cross-entropy", {"loss": "by-hand"}),
        ("train", "mean-of-logits", {"loss": "mean"}),
        ("inference", "cross-entropy", {"loss": "none", "inference_mode": True}),
    ],
)
def test_a_published_class_is_built_as_its_source_says(phase, loss_fn, expected):
    kwargs = spec_of(row(**CS336, workload__phase=phase, workload__loss_fn=loss_fn)).factory.kwargs

    assert kwargs["edition"] == 2026
    assert {key: kwargs.get(key) for key in ("loss", "inference_mode") if key in kwargs} == expected


def test_a_source_with_a_loss_of_its_own_is_not_given_that_of_its_transformers():
    own = row(source__name="universal-llm-trainer", software="transformers 4.49, torch 2.5.1")

    assert spec_of(own).factory.kwargs["logits"] == "shifted-narrow"


@pytest.mark.parametrize(("version", "logits"), [("4.45.2", "shifted"), ("4.48.1", "shifted-by-function"), ("5.13.1", None)])
def test_the_loss_is_that_of_the_version_that_ran(version, logits):
    spec = spec_of(row(software=f"transformers {version}"))

    assert (spec.factory.kwargs["logits"] if spec.factory else None) == logits


# -- several GPUs ------------------------------------------------------------------------------------------------------------


def several(kind, gpus=2, **changes):
    parallel = {"kind": kind, "dp": gpus, "tp": 1, "pp": 1, "cp": 1, **changes.pop("parallel", {})}
    return row(hardware__num_gpus=gpus, strategy__parallel=parallel, **changes)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_a_row_of_several_gpus_asks_for_its_strategy(kind):
    request = question_of(several(kind, gpus=4)).request

    assert (request.strategy, request.gpus, request.precision) == (kind, 4, "bf16")


def test_fsdp_over_wide_parameters_computes_in_the_type_that_the_row_names():
    wide = {"param_dtype": "fp32", "autocast": "bf16"}
    request = question_of(several("fsdp1", parallel={"mixed_precision_param_dtype": "bf16"}, strategy__precision=wide)).request

    assert request.precision == "bf16-mixed"
    assert (request.fsdp.param_dtype, request.fsdp.stored_dtype, request.fsdp.reduce_dtype) == ("bfloat16", "float32", None)


def test_what_a_launcher_sets_goes_into_the_question():
    wide = {"param_dtype": "fp32", "autocast": "bf16"}
    mixed = {"parallel": {"mixed_precision_param_dtype": "bf16"}, "strategy__precision": wide}
    ours = question_of(several("fsdp1", source__name="fms-acceleration", **mixed)).request.fsdp
    narrow = question_of(several("fsdp1", source__name="fms-acceleration")).request.fsdp

    assert (ours.use_orig_params, ours.reduce_dtype, ours.buffer_dtype) == (True, "bfloat16", "bfloat16")
    assert (narrow.use_orig_params, narrow.reduce_dtype, narrow.param_dtype) == (True, None, None)


@pytest.mark.parametrize(
    ("kind", "reshards", "expected"),
    [
        ("fsdp1", True, ("FULL_SHARD", None)),
        ("fsdp1", False, ("SHARD_GRAD_OP", None)),
        ("fsdp2", True, ("FULL_SHARD", None)),
        ("fsdp2", False, ("FULL_SHARD", False)),
    ],
)
def test_parameters_go_after_forward_where_the_row_says_so(kind, reshards, expected):
    fsdp = question_of(several(kind, parallel={"reshard_after_forward": reshards})).request.fsdp

    assert (fsdp.sharding_strategy, fsdp.reshard_after_forward) == expected


def test_16_bit_parameters_with_fp32_masters_are_deepspeeds_mixed_precision():
    masters = {"param_dtype": "bf16", "autocast": "none", "master_weights": "fp32"}

    assert question_of(several("zero2", strategy__precision=masters)).request.precision == "bf16-mixed"


def test_what_leaves_the_gpus_goes_into_the_question():
    request = question_of(several("fsdp1", strategy__offload={"optimizer": "cpu", "param": "cpu", "grad": "cpu"})).request

    assert request.offload == ("optimizer", "param")


def test_a_mean_over_batches_takes_the_length_that_the_sources_log_says():
    peak = row(group="peft/metamath", workload__padded_or_packed="assumed-full")
    mean = row(group="peft/metamath", workload__padded_or_packed="assumed-full", measured__metric="allocated_after")

    assert question_of(mean).request.seq_len == 210
    assert question_of(mean).request.use_cache
    assert question_of(peak).request.seq_len == row().workload.seq_len


def test_a_micro_step_ends_where_the_next_one_or_the_optimizers_step_begins():
    forward, backward, step = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.STEP)
    phases = [int(Phase.INIT), forward, forward, backward, forward, backward, backward, step, forward, backward]

    assert [micro_step(phases, number) for number in range(3)] == [(1, 4), (4, 7), (8, 10)]


def test_gradients_that_a_student_averages_where_they_lie_need_what_one_gpu_needs():
    request = question_of(several("ddp", **CS336)).request

    assert (request.strategy, request.gpus) == ("single", 1)
    assert (request.loop.zero_grad, request.loop.keep_outputs, request.loop.iterations) == ("before-forward", False, 1)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("fsdp2", {"parallel": {"dp": 1, "tp": 2}}, "TP is not modelled"),
        ("naive-pp", {}, "pipeline parallelism"),
        ("fsdp-own", {}, "the author's own FSDP"),
        ("zero1", CS336, "ZeRO-1 of the source's own making"),
        ("fsdp1", {"strategy__offload": {"activation": "cpu"}}, "offload of activations"),
        ("fsdp2", {"source__name": "torchtitan", "model__family": "qwen3"}, "torchtitan's qwen3"),
    ],
)
def test_what_is_not_modelled_on_several_gpus_says_why(kind, changes, reason):
    with pytest.raises(CannotTell, match=reason):
        question_of(several(kind, **changes))


def test_a_source_with_recompute_of_its_own_is_not_given_another():
    asked = question_of(
        several("fsdp2", source__name="torchtitan", strategy__recompute="selective-op", model__config__num_key_value_heads=4)
    ).request

    assert asked.recompute == "none"
    assert asked.model.factory.kwargs["recompute"] == "selective-op"
    assert asked.alloc_conf == "expandable_segments:True"


def test_gradients_were_kept_before_torch_2():
    assert question_of(row(software="torch 1.12 cu113")).request.loop.set_to_none is False
    assert question_of(row(software="torch 2.1.0")).request.loop.set_to_none is True


# -- scores --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces():
    return TraceSource()


def peak(traces, **changes):
    scored = score_row(row(**changes), traces)
    assert scored.expressed, scored.reason
    return scored.predicted_bytes


def test_each_metric_meets_the_figure_that_means_the_same(traces):
    allocated = peak(traces)
    reserved = peak(traces, measured__metric="reserved_peak")
    process = peak(traces, measured__metric="nvml_peak")

    assert allocated < reserved < process
    assert peak(traces, measured__metric="reserved_minus_init") == reserved  # nothing is reserved before a model is made
    assert process - reserved == question_of(row()).request.device.context_bytes


def test_a_figure_that_nobody_names_is_read_in_every_way_and_counted_in_none(traces):
    scored = score_row(row(measured__metric="unspecified"), traces)

    assert not scored.expressed
    assert "does not say which figure" in scored.reason
    known = [peak(traces, measured__metric=metric) for metric in ("allocated_peak", "reserved_peak", "nvml_peak")]
    assert [predicted for predicted, _ in scored.phases.values()] == known
    text = as_page([scored], [], [], "torch")
    assert "| row | figure |" in text
    assert "| somebody | 1 |" in text


def test_a_context_that_the_source_measured_takes_the_place_of_the_catalogues(traces):
    reserved = peak(traces, measured__metric="reserved_peak")

    measured = {"metric": "nvml_peak", "bytes": 1, "phases": {"cuda_context": 12345}}
    assert peak(traces, measured=measured) - reserved == 12345


def test_a_loss_that_copies_logits_while_the_model_holds_them_needs_those_too(traces):
    long = {"workload__seq_len": 2048}
    logits_bytes = 2 * 2048 * 1000 * 2  # bf16

    old = peak(traces, software="transformers 4.48.1", **long)
    new = peak(traces, software="transformers 5.13.1", **long)

    assert logits_bytes * 0.9 < old - new < logits_bytes * 1.1


def test_a_fused_loss_never_holds_all_logits(traces):
    long = {"workload__seq_len": 2048, "software": "transformers 5.13.1"}

    assert peak(traces, strategy__loss="liger-fused", **long) < peak(traces, **long) - 2 * 2048 * 1000 * 4


def test_after_the_step_parameters_gradients_and_states_are_there(traces):
    measured = {"metric": "allocated_after", "bytes": 1, "phases": {"after_optimizer_step": 1}}
    num_params = 2 * 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    states = 4 * 2 * num_params  # parameters, gradients and two moments, 2 bytes each

    assert states < peak(traces, measured=measured) < states * 1.1 + 2 * 8_519_680  # and the cuBLAS workspaces


def test_a_model_too_large_for_the_card_is_judged_so(traces):
    changes = {"measured": {"metric": "oom"}, "hardware__gpu_memory_gib": 0.6, "workload__micro_batch": 512}

    scored = score_row(row(**changes), traces)

    assert (scored.verdict, scored.ratio) == ("does_not_fit", None)


def test_rows_come_back_in_order_from_several_processes():
    rows = [row(id=f"r{i}", strategy__attention=a, strategy__compile=True) for i, a in enumerate(["sdpa", "eager"] * 3)]
    finished = []

    scored = score(rows, processes=2, done=finished.append)

    assert [s.id for s in scored] == [r.id for r in rows]
    assert sum(finished) == len(rows)
    assert all("torch.compile" in s.reason for s in scored)


def scored(metric="allocated_peak", predicted=None, measured=100, verdict=None, completeness="A", source="s"):
    return Scored(
        id="x",
        source=source,
        metric=metric,
        completeness=completeness,
        predicted_bytes=predicted,
        measured_bytes=measured,
        verdict=verdict,
    )


def test_a_summary_states_coverage_error_and_bias():
    rows = [scored(predicted=p) for p in (90, 98, 101, 110)] + [scored()]

    summary = summarise(rows)[0]

    assert (summary.rows, summary.expressed, summary.coverage) == (5, 4, 0.8)
    assert summary.median_abs_error == pytest.approx(0.06)
    assert summary.p90_abs_error == pytest.approx(0.10)
    assert summary.bias == pytest.approx(-0.0025)


def test_wrong_verdicts_are_counted_by_their_direction():
    rows = [
        scored("oom", 1, None, "fits"),
        scored("oom", 1, None, "tight"),
        scored("oom", 1, None, "does_not_fit"),
        scored("fits", 1, None, "does_not_fit"),
        scored("fits", 1, None, "tight"),
    ]

    oom, fits = summarise(rows)[:2]

    assert (oom.false_fits, oom.false_does_not_fit) == (2, 0)
    assert (fits.false_fits, fits.false_does_not_fit) == (0, 1)


def test_the_last_summaries_are_over_all_sources():
    last = summarise([scored(predicted=1, source="a"), scored(predicted=1, source="b", completeness="B")])[-2:]

    assert [(s.source, s.completeness, s.rows) for s in last] == [(ALL, "A", 1), (ALL, ALL, 2)]


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_scores_what_it_can_and_names_what_it_cannot(written, capsys):
    file = written(tiny(), tiny(id="b", workload__phase="tomorrow"), tiny(id="c", strategy__offload={"grad": "cpu"}))

    assert main(["accuracy", str(file), "--json", "--processes", "1"]) == 0

    out, err = capsys.readouterr()
    data = json.loads(out)
    assert "line 2, workload.phase" in err
    assert [r["id"] for r in data["rows"]] == ["tiny", "c"]
    good, bad = data["rows"]
    assert good["ratio"] == good["predicted_bytes"] / 10_000_000
    assert bad["predicted_bytes"] is None
    assert "offload" in bad["reason"]
    assert {s["metric"] for s in data["summary"]} == {"allocated_peak"}


def test_the_command_writes_the_page(written, tmp_path, capsys):
    page = tmp_path / "page.md"

    assert main(["accuracy", str(written(tiny())), "--processes", "1", "--write", str(page)]) == 0

    text = page.read_text()
    assert text.startswith("# How accurate the predictions are\n")
    assert "| tiny | allocated_peak |" in text


def test_nothing_to_score_is_a_mistake_of_the_user(written, capsys):
    assert main(["accuracy", str(written(tiny())), "--where", "source=nobody"]) == 2
    assert "leaves no row" in capsys.readouterr().err
