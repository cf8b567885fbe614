"""What a kernel allocates inside, against figures read from public CUDA memory snapshots and the kernels' sources."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import memplan
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.hardware.catalogue import resolve
from memplan.planner.kernels import Hidden, Kernels, _flash_splits, _sort_temporary
from memplan.planner.trace.steptrace import Signature, TensorInfo

SNAPSHOTS = Path(memplan.__file__).resolve().parent.parent / "shared" / "snapshots"


def device(key: str):
    return resolve(key)[0]


def dense(shape) -> TensorInfo:
    stride, step = [], 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= size
    return shape, tuple(stride)


def info(shape, dtype="float32", stride=None) -> TensorInfo:
    shape, natural = dense(tuple(shape))
    return TensorInfo(dtype, shape, natural if stride is None else tuple(stride))


def hidden(op: str, inputs, outputs, scalars=None, *, gpu="a100-80gb", torch="2.13.0") -> Hidden:
    signature = Signature(op, tuple(inputs), tuple(outputs), scalars or {}, 0, 0)
    trace = SimpleNamespace(op_signature=np.array([0]), signatures=[signature])
    return Kernels.for_device(device(gpu), torch).of_ops(trace)[0]


def live_peak(transient) -> int:
    sizes, live, best = [], 0, 0
    for step in transient:
        if step > 0:
            sizes.append(step)
            live += step
        else:
            live -= sizes[-step - 1]
        best = max(best, live)
    return best


# -- matrix products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu", "nbytes"), [("a100-80gb", 8_519_680), ("rtx-4090", 8_519_680), ("h100", 33_554_432)])
@pytest.mark.parametrize("op", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_matrix_product_brings_the_cublas_workspace(op, gpu, nbytes):
    operands = [info((8,))] * (op in ("addmm", "baddbmm")) + [info((4, 8)), info((8, 8))]
    assert hidden(f"aten.{op}.default", operands, [info((4, 8))], gpu=gpu).workspace == ("cublas", nbytes)


@pytest.mark.parametrize(
    ("torch", "transient"), [("2.6.0", (1_048_576,)), ("2.7.1+cu128", (1_048_576,)), ("2.8.0", ()), ("2.13.0", ())]
)
def test_a_linear_with_bias_takes_one_mebibyte_up_to_torch_2_7(torch, transient):
    assert (
        hidden("aten.addmm.default", [info((8,)), info((4, 8)), info((8, 8))], [info((4, 8))], torch=torch).transient
        == transient
    )


def test_the_cpu_target_expands_nothing():
    trace = SimpleNamespace(op_signature=np.array([0]), signatures=[Signature("aten.mm.default", (), (), {}, 0, 0)])
    assert Kernels.none().of_ops(trace)[0] == Hidden()


# -- attention -------------------------------------------------------------------------------------------------------------


def bhsd(batch, heads, seq, dim, dtype="bfloat16") -> TensorInfo:
    """[batch, head, seq, dim] that lies as [batch, seq, head, dim] in memory."""
    return info((batch, heads, seq, dim), dtype, (seq * heads * dim, dim, heads * dim, 1))


def attention(kernel, query, key, *, dropout=0.0, training=True, gpu="a100-80gb") -> Hidden:
    batch, heads, seq, _ = query.shape
    statistics = info((batch, heads, seq) if training else (0,))
    scalars = {"4": dropout, "5": True, "6": kernel, "7": training}
    return hidden("memplan.attention.default", [query, key, key], [query, statistics, info((2,), "int64")], scalars, gpu=gpu)


def attention_backward(kernel, query, key, *, grad=None, gpu="a100-80gb") -> Hidden:
    batch, heads, seq, _ = query.shape
    inputs = [grad or query, query, key, key, query, info((batch, heads, seq)), info((2,), "int64")]
    scalars = {"8": 0.0, "9": True, "10": kernel, "11": False}
    return hidden("memplan.attention_backward.default", inputs, [query, key, key, info((0,))], scalars, gpu=gpu)


def test_flash_saves_a_row_statistic_and_two_small_blocks_for_the_seed():
    query = bhsd(4, 32, 2000, 128)
    assert attention("flash", query, query).output_bytes == {1: 4 * 4 * 32 * 2000, 2: 1024}


def test_efficient_rounds_the_statistic_up_to_32_rows_and_keeps_the_seed_on_the_host():
    query = bhsd(4, 32, 2001, 64, "float32")
    assert attention("efficient", query, query).output_bytes == {1: 4 * 4 * 32 * 2016, 2: 0}


@pytest.mark.parametrize(("kernel", "kept"), [("flash", 4 * 4 * 32 * 2048), ("efficient", 0)])
def test_without_gradients_only_the_efficient_kernel_keeps_no_statistic(kernel, kept):
    # flash_api.cpp, mha_fwd makes softmax_lse always; the efficient kernel asks compute_log_sumexp
    query = bhsd(4, 32, 2048, 64)
    assert attention(kernel, query, query, training=False).output_bytes[1] == kept


def test_efficient_accumulates_wide_heads_of_16_bit_types_in_fp32():
    wide, narrow, full = bhsd(2, 4, 512, 256), bhsd(2, 4, 512, 128), bhsd(2, 4, 512, 256, "float32")
    assert attention("efficient", wide, wide).transient == (4 * 2 * 4 * 512 * 256,)
    assert attention("efficient", narrow, narrow).transient == ()
    assert attention("efficient", full, full).transient == ()


def test_flash_backward_of_grouped_keys_matches_the_published_example():
    # B4 S2048 H32 Hk8 D128 bf16: softmax_d, dq in fp32, dk and dv expanded to all heads (mha_bwd)
    found = attention_backward("flash", bhsd(4, 32, 2048, 128), bhsd(4, 8, 2048, 128))
    assert found.transient == (1_048_576, 134_217_728, 67_108_864, 67_108_864)
    assert found.transient[2] + found.transient[3] == 134_217_728


def test_flash_backward_of_equal_heads_expands_nothing_and_rounds_rows_to_128():
    query = bhsd(1, 2, 100, 80)
    assert attention_backward("flash", query, query).transient == (4 * 2 * 128, 4 * 128 * 2 * 96)


def test_flash_backward_copies_a_gradient_that_is_laid_out_otherwise():
    query = bhsd(1, 2, 128, 64)
    plain = attention_backward("flash", query, query).transient
    assert attention_backward("flash", query, query, grad=info((1, 2, 128, 64), "bfloat16")).transient == (query.nbytes, *plain)


def test_efficient_backward_matches_a_recorded_workspace():
    # fp32, B*H = 2048, one query row, D = 256, compute capability 8.6: product, delta, workspace in this order
    query = bhsd(2048, 1, 1, 256, "float32")
    assert attention_backward("efficient", query, query, gpu="rtx-3090").transient == (2_097_152, 8_192, -1, 134_348_800)


@pytest.mark.parametrize(("gpu", "block"), [("a100-80gb", 128 * 128), ("rtx-3090", 64 * 64)])
def test_efficient_backward_of_half_types_takes_larger_tiles_where_shared_memory_allows(gpu, block):
    query = bhsd(1, 300, 128, 128)
    workspace = attention_backward("efficient", query, query, gpu=gpu).transient[-1]
    tiles = (128 * 128) // block
    in_memory = 0 if gpu == "a100-80gb" else 2 * 64 * 128  # dK and dV of one split leave the registers
    assert workspace == 300 * 4 * (tiles * (16 + 4 * block) // 4 + in_memory)


@given(st.integers(1, 500), st.integers(1, 300), st.integers(1, 200))
def test_a_gpu_that_is_full_needs_no_split(blocks, sms, n_blocks):
    splits = _flash_splits(blocks, sms, n_blocks)
    assert 1 <= splits <= min(128, sms, max(n_blocks, 1))
    if blocks >= 0.8 * sms:
        assert splits == 1


def test_flash_forward_splits_a_long_key_of_few_queries_and_dropout_forbids_it():
    query, key = bhsd(1, 2, 64, 64), bhsd(1, 2, 8192, 64)
    rows, accumulator = attention("flash", query, key).transient
    splits = rows // (4 * 2 * 64)
    assert splits > 1
    assert accumulator == 4 * splits * 2 * 64 * 64
    assert attention("flash", query, key, dropout=0.1).transient == ()


def test_flash_forward_of_ordinary_training_allocates_nothing():
    query = bhsd(4, 32, 2048, 128)
    assert attention("flash", query, query).transient == ()


# -- reductions ------------------------------------------------------------------------------------------------------------


def column_sum(rows, columns, gpu) -> Hidden:
    return hidden("aten.sum.dim_IntList", [info((rows, columns))], [info((columns,))], {"1": [0]}, gpu=gpu)


# (bytes, semaphores) of column sums in public snapshots, with the rows, columns and GPU that give them
RECORDED = [
    ((41_943_040, 80), (2048, 2560, "a100-80gb")),
    ((16_777_216, 32), (2048, 1024, "a100-80gb")),
    ((33_554_432, 32), (4096, 1024, "a100-80gb")),
    ((8_388_608, 32), (1024, 1024, "a100-80gb")),
    ((12_582_912, 24), (2048, 768, "a100-80gb")),
    ((4_194_304, 16), (1024, 512, "rtx-3090")),
    ((16_777_216, 64), (1024, 2048, "rtx-3090")),
    ((12_582_912, 48), (1024, 1536, "rtx-3090")),
]


@pytest.mark.parametrize(("blocks", "shape"), RECORDED)
def test_a_column_sum_takes_the_buffer_and_semaphores_that_were_recorded(blocks, shape):
    assert column_sum(*shape).transient[:2] == blocks


def test_the_semaphores_of_a_column_sum_die_before_its_buffer():
    assert column_sum(2048, 2560, "a100-80gb").transient[2:] == (-2, -1)


def test_the_number_of_sms_caps_the_buffer():
    # 82 SMs * (1536 // 128) / 4 columns of blocks = 246 thread blocks a column: RTX 3090
    assert column_sum(16_384, 512, "rtx-3090").transient[:2] == (64_487_424, 16)


@pytest.mark.parametrize(
    ("shape", "result", "dims"),
    [((1000, 2560), (2560,), [0]), ((2048, 2560), (2048,), [1]), ((2048, 2560), (1,), [0, 1]), ((1, 2560), (2560,), [0])],
    ids=["few rows", "rows", "all", "nothing to sum"],
)
def test_other_sums_take_no_buffer(shape, result, dims):
    assert hidden("aten.sum.dim_IntList", [info(shape)], [info(result)], {"1": dims}).transient == ()


@given(st.integers(1, 20_000), st.integers(1, 9_000), st.sampled_from(["a100-80gb", "h100", "rtx-3090"]))
def test_a_column_sum_takes_either_nothing_or_a_buffer_with_semaphores(rows, columns, gpu):
    transient = column_sum(rows, columns, gpu).transient
    assert not transient or transient == (*transient[:2], -2, -1)
    assert all(t > 0 for t in transient[:2])
    assert not transient or transient[0] % (4 * columns) == 0


# -- indexing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "nbytes"), [(1, 1), (2048, 1), (4096, 72_191), (8192, 138_751), (16_384, 271_871)])
def test_a_sort_takes_what_was_recorded(n, nbytes):
    assert _sort_temporary(n) == nbytes


def embedding_backward(n, width, dtype="float32") -> Hidden:
    return hidden(
        "aten.embedding_dense_backward.default",
        [info((1, n, width), dtype), info((1, n), "int64")],
        [info((50_000, width), dtype)],
        {"2": 50_000, "3": -1, "4": False},
    )


def test_the_embedding_gradient_of_few_tokens_is_summed_in_place():
    assert embedding_backward(3072, 768).transient == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedding_gradient_of_many_tokens_takes_a_row_of_fp32_for_each(dtype):
    transient = embedding_backward(8192, 4096, dtype).transient
    assert transient[-1] == 134_217_728
    # at the peak: sorted and original indices, segment offsets, count, two per segment, partial offsets ... and the rows
    assert live_peak(transient) == 134_217_728 + 6 * 65_536 + 8


def index_put(n, accumulate) -> Hidden:
    return hidden(
        "aten.index_put_.default",
        [info((32_000, 64)), info((n,), "int64"), info((n, 64))],
        [info((32_000, 64))],
        {"3": accumulate} if accumulate else {"3": False},
    )


@pytest.mark.parametrize(
    ("n", "blocks"), [(512, [4096] * 5 + [1]), (2048, [16_384] * 5 + [1]), (4096, [32_768] * 5 + [72_191])]
)
def test_the_backward_of_indexing_sorts_with_five_blocks_and_a_temporary(n, blocks):
    assert [t for t in index_put(n, True).transient if t > 0] == blocks


def test_writing_by_index_without_adding_sorts_nothing():
    assert index_put(4096, False).transient == ()


# -- layer norm ------------------------------------------------------------------------------------------------------------


def layer_norm_backward(rows, columns) -> Hidden:
    row = info((rows, columns))
    statistic = info((rows, 1))
    return hidden(
        "aten.native_layer_norm_backward.default", [row, row, statistic, statistic, info((columns,)), info((columns,))], [row]
    )


def test_layer_norm_backward_of_few_rows_takes_nothing():
    assert layer_norm_backward(1024, 768).transient == ()


def test_layer_norm_backward_of_many_rows_sums_in_two_partial_tables():
    # min(32768 / ceil(768 / 32), ceil(131072 / 32)) = 1365 partial rows of the weight's and of the bias's gradient
    assert layer_norm_backward(131_072, 768).transient == (1365 * 768 * 4,) * 2


@pytest.mark.skipif(not (SNAPSHOTS / "trace_096.json.gz").exists(), reason="the snapshots are not beside the repository")
def test_the_recorded_figures_are_in_the_snapshot():
    events = json.loads(gzip.decompress((SNAPSHOTS / "trace_096.json.gz").read_bytes()))
    text = json.dumps(events)
    for size in (134_348_800, 8_519_680, 1_048_576, 4_194_304):
        assert str(size) in text


@pytest.mark.parametrize("by_batch", [False, True], ids=["heads apart", "heads together"])
def test_flash_attention_lays_its_output_and_gradients_out_as_torch_says(by_batch):
    """Like the query: one that comes out of `cat` has its heads apart, one that is a view of a projection together."""
    import memplan.planner.trace.cuda  # noqa: F401  # registers the op
    import torch

    query = torch.empty((2, 64, 4, 32), dtype=torch.bfloat16, device="meta").transpose(1, 2)
    if not by_batch:
        query = query.contiguous()
    ours = torch.ops.memplan.attention(query, query, query, None, 0.0, False, "flash", True)[0]
    real = torch.ops.aten._scaled_dot_product_flash_attention(query, query, query)[0]
    assert (ours.shape, ours.stride()) == (real.shape, real.stride())
