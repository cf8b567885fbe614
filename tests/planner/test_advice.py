"""What else would fit: maxima are maxima, and remedies keep what they promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memplan.planner import advice, cache
from memplan.planner.advice import advise, largest, max_micro_batch_size, max_seq_len, remedies
from memplan.planner.api import make_request
from memplan.planner.predict import predict
from memplan.planner.prediction import Remedy, Verdict
from memplan.planner.request import Request
from memplan.planner.trace.source import TraceSource

MODEL, LAYERS = "openai-community/gpt2", {"n_layer": "2", "vocab_size": "1024"}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPLAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def source() -> TraceSource:
    return TraceSource()


def asked(usable: int | None = None, **options) -> Request:
    """A question about a card that leaves `usable` bytes to torch."""
    options = {"micro_batch_size": 4, "seq_len": 256, "precision": "fp32", **options}
    request = make_request(MODEL, "a100-80gb", overrides=LAYERS, **options)
    if usable is None:
        return request
    missing = usable - request.device.usable_bytes
    return replace(request, device=request.device.model_copy(update={"total_bytes": request.device.total_bytes + missing}))


def fits(request: Request, source: TraceSource) -> bool:
    return predict(request, source).fits


@pytest.mark.parametrize("gib", [0.6, 2, 6])
@pytest.mark.parametrize("options", [{}, {"mode": "inference"}, {"precision": "bf16"}], ids=["train", "inference", "bf16"])
def test_the_largest_batch_fits_and_one_more_does_not(source, gib, options):
    request = asked(int(gib * 2**30), **options)
    largest = max_micro_batch_size(request, source)
    assert largest is not None
    assert fits(request.but(micro_batch_size=largest), source)
    assert not fits(request.but(micro_batch_size=largest + 1), source)


@pytest.mark.parametrize("start", [1, 7, 300])
def test_the_largest_batch_does_not_depend_on_the_one_that_was_asked(source, start):
    request = asked(3 * 2**30)
    assert max_micro_batch_size(request.but(micro_batch_size=start), source) == max_micro_batch_size(request, source)


def test_the_longest_sequence_fits_and_sixteen_tokens_more_do_not(source):
    request = asked(2**30, micro_batch_size=8)
    longest = max_seq_len(request, source)
    assert longest is not None
    assert longest % 16 == 0
    assert longest < 1024
    assert fits(request.but(seq_len=longest), source)
    assert not fits(request.but(seq_len=longest + 16), source)


def test_no_sequence_is_longer_than_the_model_allows(source):
    assert max_seq_len(asked(), source) == 1024


def test_a_card_that_takes_not_even_one_sample_has_no_largest_batch(source):
    assert max_micro_batch_size(asked(2**27), source) is None


def test_a_picture_has_no_length(source):
    request = make_request("google/vit-base-patch16-224", "l4", overrides={"num_hidden_layers": "1"}, micro_batch_size=1)
    assert max_seq_len(request, source) is None


@pytest.mark.parametrize("boundary", [1, 2, 3, 50, 4095, 4096])
@pytest.mark.parametrize("start", [1, 60, 4096])
def test_the_search_finds_any_boundary(boundary, start):
    assert largest(lambda n: (n <= boundary, n / (boundary + 0.5)), 1, 4096, start) == boundary


def tries(fits, live, start=1, high=4096):
    """(what is found, how many questions it took)."""
    asked = []

    def answer(n):
        asked.append(n)
        return fits(n), live(n)

    found = largest(answer, 1, high, start)
    assert len(asked) == len(set(asked))
    return found, len(asked)


@pytest.mark.parametrize(
    "live", [lambda n: 0.5 if n <= 777 else 2.0, lambda n: n * n / (777 * 777 + 777), lambda n: 1.0, lambda n: 0.3]
)
def test_the_search_finds_a_boundary_that_is_no_line(live):
    found, count = tries(lambda n: n <= 777, live)
    assert found == 777
    assert count < 40


@pytest.mark.parametrize("boundary", [9, 130, 1200])
@pytest.mark.parametrize("lost", [0.0, 0.03, 0.1])
def test_a_bend_and_fragmentation_cost_few_questions(boundary, lost):
    """A moment that hardly depends on the batch is the peak at first; `lost`: what fragmentation takes."""
    slope = (1 - lost) / (boundary + 0.5)
    found, count = tries(lambda n: n <= boundary, lambda n: max(0.52 + 1e-5 * n, slope * n))
    assert found == boundary
    assert count <= (8 if lost == 0 else 20)


def test_the_search_knows_that_nothing_fits():
    assert largest(lambda n: (False, 2.0), 1, 100, 50) is None


# -- remedies --------------------------------------------------------------------------------------------------------------


def remedies_of(request: Request, source: TraceSource) -> list[Remedy]:
    return remedies(request, source, predict(request, source))


def apply(request: Request, option: str) -> Request:
    """The question with the options of a remedy added, as a person would type them."""
    fields = {
        "--micro-batch": ("micro_batch_size", int),
        "--seq": ("seq_len", int),
        "--grad-accum": ("grad_accum_steps", int),
        "--zero-grad": ("zero_grad", str),
        "--optimizer": ("optimizer", str),
        "--optimizer-impl": ("optimizer_impl", str),
        "--precision": ("precision", str),
        "--recompute": ("recompute", str),
        "--attention": ("attention", str),
        "--alloc-conf": ("alloc_conf", str),
        "--loss": ("loss", str),
    }
    words = iter(option.split())
    for word in words:
        if word == "without":
            name = next(words).removeprefix("--").replace("-", "_")
            request = request.but(set_to_none=True) if name == "keep_grads" else request.but(**{name: False})
            continue
        name, kind = fields[word.rstrip(";")]
        request = request.but(**{name: kind(next(words))})
    return request


ASKED = [
    {},
    {"keep_outputs": True, "zero_grad": "before-forward"},
    {"attention": "eager"},
    {"set_to_none": False, "optimizer": "sgd"},
    {"optimizer_impl": "fused"},
]


@pytest.mark.parametrize("share", [0.95, 0.7, 0.4])
@pytest.mark.parametrize("options", ASKED)
def test_a_remedy_needs_what_it_promises_when_it_is_applied_as_written(source, share, options):
    request = asked(**options)
    request = asked(int(predict(request, source).allocated_peak_bytes * share), **options)
    assert not fits(request, source)
    found = remedies_of(request, source)
    assert found
    for remedy in found:
        if remedy.option.startswith("--gpu "):
            continue  # another card: the next test
        applied = predict(apply(request, remedy.option), source)
        assert (applied.reserved_peak_bytes, applied.verdict) == (remedy.reserved_peak_bytes, remedy.verdict), remedy.option


def test_remedies_that_make_it_fit_come_before_those_that_do_not(source):
    request = asked(int(predict(asked(), source).reserved_peak_bytes * 0.9))
    verdicts = [r.verdict in (Verdict.FITS, Verdict.TIGHT) for r in remedies_of(request, source)]
    assert verdicts == sorted(verdicts, reverse=True)
    assert verdicts[0]


def test_a_smaller_batch_keeps_the_samples_of_an_optimizer_step(source):
    request = asked(
        int(predict(asked(micro_batch_size=16), source).reserved_peak_bytes * 0.6), micro_batch_size=16, grad_accum_steps=2
    )
    (remedy,) = [r for r in remedies_of(request, source) if "--micro-batch" in r.option]
    applied = apply(request, remedy.option)
    assert applied.micro_batch_size * applied.loop.grad_accum_steps >= 16 * 2
    assert applied.micro_batch_size < 16


def test_where_nothing_helps_no_change_promises_to(source):
    # 15 million parameters and their gradients take 60 MB in 16 bits: only another card is left
    helping = [r.option for r in remedies_of(asked(2**25), source) if r.verdict is not Verdict.DOES_NOT_FIT]
    assert [option.split()[0] for option in helping] == ["--gpu"]


def test_the_card_that_is_offered_is_one_on_which_it_fits_as_it_is(source):
    from memplan.hardware.catalogue import device

    request = asked(2**25)
    (option,) = [r.option for r in remedies_of(request, source) if r.option.startswith("--gpu ")]
    assert predict(request.but(device=device(option.split()[1])), source).verdict is Verdict.FITS


def test_advice_depends_on_the_verdict(source):
    good = asked()
    fitting = advise(predict(good, source), good, source)
    assert fitting.remedies == ()
    assert fitting.max_micro_batch_size >= 4
    bad = asked(2**27)
    failing = advise(predict(bad, source), bad, source)
    assert failing.remedies
    assert failing.max_micro_batch_size is None
    unknown = predict(replace(good, gpus=8), source)
    assert advise(unknown, good, source) is unknown


# -- what is kept on disk --------------------------------------------------------------------------------------------------


def test_the_largest_are_searched_once_and_then_read_back(source, monkeypatch):
    request = asked(int(0.7 * 2**30))
    first = advise(predict(request, source), request, source)
    monkeypatch.setattr(advice, "_batches", lambda *_: pytest.fail("it is searched again"))
    again = advise(predict(request, TraceSource()), request, TraceSource())

    assert first.max_micro_batch_size
    assert (again.max_micro_batch_size, again.max_seq_len) == (first.max_micro_batch_size, first.max_seq_len)


@pytest.mark.parametrize("content", [b"", b"[1", b"[1, 2, 3]", b"7", b"\xff"])
def test_an_entry_that_cannot_be_read_is_searched_again(source, content, monkeypatch):
    request = asked(int(0.7 * 2**30))
    right = advise(predict(request, source), request, source)
    monkeypatch.setattr(cache, "get", lambda name: content)

    assert advise(predict(request, source), request, source) == right


def test_another_card_or_another_memplan_has_an_entry_of_its_own(source, monkeypatch):
    small, large = asked(int(0.7 * 2**30)), asked(6 * 2**30)
    found = [advise(predict(r, source), r, source).max_micro_batch_size for r in (small, large)]
    name = cache.answer_key("largest", repr(small))
    monkeypatch.setattr(cache, "_code_fingerprint", lambda patterns: "another memplan")

    assert found[0] < found[1]
    assert cache.answer_key("largest", repr(small)) != name
