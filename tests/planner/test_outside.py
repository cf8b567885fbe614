"""What NCCL takes of a GPU: once for a process, and for each communicator that the strategy uses."""

import pytest
from memplan.hardware.catalogue import communicator_bytes, device, nccl_bytes, nccl_figures
from memplan.planner.api import fits, make_request
from memplan.planner.strategies.outside import communicators, said
from memplan.validator.zoo import find

MIB = 1 << 20
LLAMA = find("llama").spec(num_hidden_layers=2)


def ask(gpu="a100-80gb", **options):
    return make_request(LLAMA, gpu, **{"precision": "fp32", "micro_batch_size": 1, "seq_len": 16, **options})


def test_a_process_alone_has_no_nccl():
    request = ask()
    assert request.device.context_bytes == device("a100-80gb").context_bytes
    assert said(request) == ""


def test_the_parts_come_from_published_measurements_and_explain_another_one():
    """The first barrier of two ranks took 1,485 MiB in all; what stays without a communicator, and one, come near it."""
    whole = next(f for f in nccl_figures() if f.key == "first-barrier").values
    assert nccl_bytes(2, 0) == 748 * MIB
    assert nccl_bytes(2) / MIB == pytest.approx(whole[1] - whole[0], rel=0.15)


@pytest.mark.parametrize(("strategy", "count"), [("ddp", 1), ("fsdp2", 1), ("zero2", 1), ("zero3", 2), ("hsdp", 2)])
def test_each_strategy_has_the_communicators_of_its_process_groups(strategy, count):
    plain = device("a100-80gb").context_bytes
    request = ask(strategy=strategy, gpus=4, nodes=2 if strategy == "hsdp" else 1)
    assert communicators(strategy) == count
    assert request.device.context_bytes - plain == nccl_bytes(4, 0) + count * communicator_bytes(4)


def test_another_strategy_of_the_same_question_has_its_own_communicators():
    two = ask(strategy="ddp", gpus=2)
    assert two.but(strategy="zero3").device == ask(strategy="zero3", gpus=2).device
    assert two.but(strategy="zero3").but(strategy="ddp").device == two.device
    assert two.but(seq_len=8).device == two.device
    assert ask().but(strategy="release").device == ask().device


def test_what_cannot_be_known_is_said():
    answer = fits(LLAMA, "h100-80gb", precision="fp32", seq_len=16, micro_batch_size=1, strategy="ddp", gpus=8)
    line = next(a for a in answer.assumptions if a.startswith("NCCL takes"))
    assert "1.40 GiB outside PyTorch: 0.73 GiB once, and 0.67 GiB for its communicator" in line
    assert "between 0.5 and 1.6 GiB" in line
    assert "NVLink SHARP, where NCCL chooses it, adds 0.25 GiB" in line
    assert answer.device_peak_bytes == answer.reserved_peak_bytes + device("h100-80gb").context_bytes + nccl_bytes(8)


def test_nvlink_sharp_is_not_spoken_of_where_there_is_none():
    for gpu, gpus in (("a100-80gb", 8), ("h100-80gb", 2), ("h100-pcie-80gb", 4), ("rtx-4090", 4)):
        assert "SHARP" not in said(ask(gpu, strategy="ddp", gpus=gpus))
