"""A family's trace at any point of its domain is the trace that the model itself makes there, byte for byte."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memplan.planner import cache
from memplan.planner.api import make_request
from memplan.planner.request import Request
from memplan.planner.trace.depth import same_structure
from memplan.planner.trace.family import MAX_BATCH, Domain, NoFamily, TraceFamily, domains, find_family
from memplan.planner.trace.source import TraceSource, thresholds
from memplan.planner.trace.steptrace import StepTrace


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))


def request(model: str, point: tuple[int, int] = (2, 64), **options) -> Request:
    overrides = options.pop("overrides", {})
    batch, seq = point
    return make_request(model, "a100-80gb", overrides=overrides, micro_batch_size=batch, seq_len=seq, **options)


TWO_LAYERS = {"num_hidden_layers": "2"}
MODELS = {
    "llama": ("meta-llama/Llama-3.1-8B", {"overrides": TWO_LAYERS}),
    "bert": ("google-bert/bert-base-uncased", {"overrides": TWO_LAYERS}),
    "gpt2-eager": ("openai-community/gpt2", {"overrides": {"n_layer": "2"}, "attention": "eager", "precision": "bf16"}),
    "t5": ("google-t5/t5-small", {"overrides": {"num_layers": "2", "num_decoder_layers": "2"}}),
    "vit": ("google/vit-base-patch16-224", {"overrides": TWO_LAYERS}),
    "mixtral": ("mistralai/Mixtral-8x7B-v0.1", {"overrides": TWO_LAYERS, "precision": "bf16"}),
}


def points_of(name: str, longest: int) -> list[tuple[int, int]]:
    """Random points of a model, the same every time: a single sample and several; aligned and unaligned lengths."""
    chosen = random.Random(name)
    aligned = [(chosen.choice([2, 3, 7]), 16 * chosen.randint(2, longest // 16)) for _ in range(1)]
    unaligned = [
        (chosen.choice([2, 3, 7]), 16 * chosen.randint(2, longest // 16 - 1) + chosen.randint(1, 15)) for _ in range(3)
    ]
    return [*aligned, *unaligned, (1, chosen.randint(32, longest)), (chosen.randint(1, 3), chosen.randint(1, 31))]


def assert_same(source: TraceSource, asked: Request) -> None:
    assert same_structure(source.step(asked), TraceSource(exact=True).step(asked)), (asked.micro_batch_size, asked.seq_len)


@pytest.mark.parametrize("name", MODELS)
def test_a_family_equals_the_exact_trace_at_random_points(name):
    model, options = MODELS[name]
    source = TraceSource()
    base = request(model, **options)
    for batch, seq in points_of(name, min(base.model.max_seq_len or 1024, 1024)):
        assert_same(source, base.but(micro_batch_size=batch, seq_len=seq))


@pytest.mark.parametrize("seq", [63, 256, 257, 500])
def test_a_family_is_exact_on_both_sides_of_a_sliding_window(seq):
    overrides = {**TWO_LAYERS, "sliding_window": "256"}
    assert_same(TraceSource(), request("google/gemma-2-2b", (2, seq), overrides=overrides))


@pytest.mark.parametrize("options", [{"mode": "inference"}, {"mode": "forward"}, {"recompute": "full"}, {"use_cache": True}])
def test_a_family_is_exact_in_every_mode(options):
    assert_same(TraceSource(), request("openai-community/gpt2", (3, 80), overrides={"n_layer": "8"}, **options))


@pytest.mark.parametrize("model", ["openai-community/gpt2", "google-bert/bert-base-uncased"])
def test_a_model_with_biases_under_autocast_has_a_family(model):
    source = TraceSource()
    asked = request(model, (2, 64), overrides=TWO_LAYERS, precision="bf16-autocast")
    assert_same(source, asked)
    assert any(source._families.values())


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_model_with_biases_and_adapters_has_a_family(method, recompute):
    """A layer in 4 bits converts its bias for good when it first runs: no recording may see what another one left."""
    source = TraceSource()
    asked = request(
        "Qwen/Qwen2.5-0.5B", (2, 64), overrides=TWO_LAYERS, method=method, recompute=recompute, precision="bf16-autocast"
    )
    assert_same(source, asked)
    assert_same(source, asked.but(micro_batch_size=5, seq_len=160))
    assert any(source._families.values())


def test_one_family_serves_every_point_of_its_domain(monkeypatch):
    source = TraceSource()
    asked = request("openai-community/gpt2", (2, 64), overrides={"n_layer": "2"})
    source.step(asked)
    monkeypatch.setattr(source, "_trace", lambda *_: pytest.fail("a point inside the domain is traced again"))
    for batch, seq in [(2, 32), (3, 128), (1000, 1024), (2, 1008)]:
        trace = source.step(asked.but(micro_batch_size=batch, seq_len=seq))
        assert (trace.options["batch_size"], trace.options["seq_len"]) == (batch, seq)


# -- domains -------------------------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 200), st.integers(32, 9000)),
    st.lists(st.integers(1, 9000), max_size=3),
    st.one_of(st.none(), st.just(9000)),
)
def test_a_domain_holds_its_point_and_its_probes_and_crosses_no_threshold(point, cuts, longest):
    for domain in domains(point, cuts, longest):
        assert point in domain
        assert all(p in domain for p in domain.probes())
        assert not any(domain.seq_min <= c < domain.seq_max for c in cuts if c >= 32)
        assert longest is None or domain.seq_max <= longest


def test_a_batch_of_one_has_a_domain_of_its_own():
    (one,), (more,) = list(domains((1, 64), [], 1024)), list(domains((2, 64), [], 1024))
    assert (one.batch_min, one.batch_max) == (1, 1)
    assert (more.batch_min, more.batch_max) == (2, MAX_BATCH)


def test_probes_of_unaligned_lengths_lie_at_both_ends_and_at_different_remainders():
    domain = Domain(2, MAX_BATCH, 32, 4096, False)
    lengths = {s for _, s in domain.probes()}
    assert min(lengths) < 32 + 16
    assert max(lengths) > 4096 - 16
    assert len({s % 8 for s in lengths}) > 1
    assert len({s % 2 for s in lengths}) > 1


def test_a_domain_too_small_for_probes_has_none():
    assert Domain(2, MAX_BATCH, 32, 128, True).probes() == []


def test_lengths_below_32_and_unknown_domains_are_traced_point_by_point():
    assert list(domains((2, 31), [], 1024)) == []


def test_thresholds_are_found_in_nested_configs():
    config = {
        "sliding_window": 4096,
        "use_sliding_window": True,
        "text_config": {"attention_chunk_size": 8192},
        "hidden_size": 3,
    }
    assert sorted(thresholds(config)) == [4096, 8192]


# -- refusal -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> StepTrace:
    return TraceSource(exact=True).step(request("openai-community/gpt2", overrides={"n_layer": "1"}))


DOMAIN = Domain(2, MAX_BATCH, 32, 1024, True)


def test_probes_that_run_other_ops_make_no_family(small):
    def probe(batch, seq):
        kinds = small.event_kind[: -1 if seq > 500 else None]
        return replace(small, event_kind=kinds, options={**small.options, "batch_size": batch, "seq_len": seq})

    with pytest.raises(NoFamily, match="not the same steps"):
        find_family(DOMAIN, probe, lambda trace: pytest.fail("not reached"))


def test_a_storage_whose_size_follows_no_expression_makes_no_family(small):
    def probe(batch, seq):
        sizes = small.storage_bytes.copy()
        sizes[-1] = batch**3
        return replace(small, storage_bytes=sizes)

    with pytest.raises(NoFamily, match="follows no expression"):
        find_family(DOMAIN, probe, lambda trace: pytest.fail("not reached"))


# -- bytes, and the cache on disk ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> TraceFamily:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        source = TraceSource()
        source.step(request("openai-community/gpt2", (2, 64), overrides={"n_layer": "8"}))
    ((found,),) = source._families.values()
    return found


def test_a_family_survives_its_file_form(family):
    again = TraceFamily.from_bytes(family.to_bytes())
    for point in [(2, 32), (5, 512)]:
        assert same_structure(again.at(*point), family.at(*point))
        assert again.at(*point).options == family.at(*point).options


def test_a_family_cut_short_anywhere_is_a_value_error(family):
    data = family.to_bytes()
    for keep in [0, 1, 30, len(data) // 3, len(data) // 2, len(data) - 1]:
        with pytest.raises(ValueError, match="not a trace"):
            TraceFamily.from_bytes(data[:keep])


@pytest.mark.parametrize("seed", range(12))
def test_a_family_with_flipped_bytes_is_a_value_error_or_the_family(family, seed):
    data = bytearray(family.to_bytes())
    chosen = random.Random(seed)
    for _ in range(3):
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    try:
        found = TraceFamily.from_bytes(bytes(data))
    except ValueError:
        return
    assert same_structure(found.at(3, 96), family.at(3, 96))


ASKED = ("openai-community/gpt2", (2, 64))
LAYERS = {"n_layer": "1"}


def entries(kind: str = "") -> list:
    return sorted(p for p in cache.folder().iterdir() if p.name.startswith(kind))


def test_a_second_source_reads_the_family_from_disk(monkeypatch):
    asked = request(*ASKED, overrides=LAYERS)
    first = TraceSource().step(asked)
    second = TraceSource()
    monkeypatch.setattr(second, "_trace", lambda *_: pytest.fail("it was on disk"))
    assert same_structure(second.step(asked), first)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"PK\x03\x04 and so on", bytes(1000)], ids=["empty", "text", "zip head", "zeros"]
)
def test_a_corrupt_entry_is_made_again(content):
    asked = request(*ASKED, overrides=LAYERS)
    first = TraceSource().step(asked)
    (entry,) = entries("family")
    whole = entry.read_bytes()
    entry.write_bytes(content)
    assert same_structure(TraceSource().step(asked), first)
    assert entry.read_bytes()[:4] == whole[:4]  # repaired


def test_an_entry_that_holds_something_else_is_made_again(small):
    asked = request(*ASKED, overrides=LAYERS)
    first = TraceSource().step(asked)
    (entry,) = entries("family")
    entry.write_bytes(small.to_bytes())  # a trace where a family is expected
    assert same_structure(TraceSource().step(asked), first)


def test_a_corrupt_point_is_made_again():
    asked = request(ASKED[0], (2, 20), overrides=LAYERS)
    first = TraceSource().step(asked)
    (entry,) = entries("point")
    entry.write_bytes(entry.read_bytes()[:-40])
    assert same_structure(TraceSource().step(asked), first)


def test_another_version_of_a_library_has_entries_of_its_own(monkeypatch):
    asked = request(*ASKED, overrides=LAYERS)
    TraceSource().step(asked)
    monkeypatch.setattr(cache, "library_versions", lambda: {"torch": "9.9", "transformers": "9.9"})
    TraceSource().step(asked)
    assert len(entries("family")) == 2


def test_the_trace_of_another_task_or_precision_is_another_entry():
    TraceSource().step(request(ASKED[0], (2, 20), overrides=LAYERS))
    TraceSource().step(request(ASKED[0], (2, 20), overrides=LAYERS, precision="bf16"))
    TraceSource().step(request(ASKED[0], (2, 20), overrides=LAYERS, task="seq-classification"))
    assert len(entries("point")) == 3


def test_sizes_beyond_32_bits_are_kept(family):
    trace = family.at(60_000, 1024)
    assert trace.storage_bytes.dtype == np.int64
    assert int(trace.storage_bytes.max()) > 2**33
