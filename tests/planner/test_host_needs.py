"""What a run needs of the machine, and that a machine which is too small is a verdict."""

from memplan.planner.ledger import Component, Ledger, LedgerBuilder, Tier
from memplan.planner.predict import host_needs

KIB = 1024


def ledger(*events: tuple[str, int, Tier]) -> Ledger:
    """("+", bytes, tier) makes a block, ("-", index of the event that made it, tier) frees it."""
    builder, blocks = LedgerBuilder(), []
    for sign, number, tier in events:
        if sign == "+":
            blocks.append(builder.alloc(number, Component.OFFLOAD_BUFFER, "x", tier))
        else:
            builder.free(blocks[number])
            blocks.append(-1)
    return builder.finish(lambda key: ("", key))


def test_a_pinned_block_is_a_power_of_two_and_waits_for_the_next_of_its_class():
    pinned = Tier.HOST_PINNED
    needs = host_needs(ledger(("+", 3 * KIB, pinned), ("-", 0, pinned), ("+", 4 * KIB, pinned), ("+", 5 * KIB, pinned)), 1)

    assert needs.pinned_bytes == 9 * KIB
    assert needs.pinned_reserved_bytes == 4 * KIB + 8 * KIB


def test_a_machine_holds_every_rank_at_the_moment_that_takes_most():
    pinned, pageable = Tier.HOST_PINNED, Tier.HOST_PAGEABLE
    events = ("+", 100, pageable), ("-", 0, pageable), ("+", 128, pinned), ("+", 50, pageable), ("+", 7, Tier.NVME)
    needs = host_needs(ledger(*events), 4)

    assert (needs.pageable_bytes, needs.pinned_reserved_bytes) == (100, 128)
    assert needs.node_bytes == 4 * (128 + 50)
    assert (needs.nvme_bytes, needs.node_nvme_bytes) == (7, 28)


def test_the_swappers_buffers_are_locked_by_the_byte():
    builder = LedgerBuilder()
    buffers = builder.alloc(5 * KIB, Component.OFFLOAD_BUFFER, "swap buffers", Tier.HOST_PINNED)
    builder.alloc(3 * KIB, Component.OFFLOAD_BUFFER, "gradients", Tier.HOST_PINNED)
    builder.free(buffers)
    needs = host_needs(builder.finish(lambda key: ("", key)), 1)

    assert needs.node_bytes == 9 * KIB
    assert needs.pinned_reserved_bytes == 4 * KIB
