"""The settings text of PyTorch's allocator: what is read, and how mistakes are answered."""

from __future__ import annotations

import pytest
from memplan.errors import UserError
from memplan.planner.allocator.config import UNLIMITED, AllocConf
from memplan.units import GiB, KiB, MiB


def test_an_empty_text_gives_the_defaults() -> None:
    assert AllocConf.parse("") == AllocConf()
    assert AllocConf().max_split_size_bytes == UNLIMITED


def test_all_settings_are_read_and_spaces_do_not_matter() -> None:
    conf = AllocConf.parse(" expandable_segments:True, max_split_size_mb : 128,garbage_collection_threshold:0.8,"
                           "per_process_memory_fraction:0.5,max_non_split_rounding_mb:64,large_segment_size_mb:40")  # fmt: skip

    assert conf == AllocConf(True, 128 * MiB, 64 * MiB, (0,) * 16, 0.8, 0.5, 40 * MiB)


def test_settings_of_host_memory_are_accepted_and_change_nothing() -> None:
    text = "backend:native,pinned_use_background_threads:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:True"

    assert AllocConf.parse(text) == AllocConf()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segment:True", "Did you mean expandable_segments"),
        ("qqqq:1", "qqqq"),
        ("expandable_segments:true", "True or False"),
        ("expandable_segments", "has no value"),
        ("expandable_segments=True", "has no value"),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:-4", "max_split_size_mb"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "at least 40"),
        ("large_segment_size_mb:10", "more than 10"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:0", "power of two"),
        ("roundup_power2_divisions:[256:1,512:3]", "power of two"),
        ("roundup_power2_divisions:[256:1", "power of two"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:nan", "between 0 and 1"),
        ("backend:cudaMallocAsync", "native"),
        ("backend:fancy", "native"),
    ],
)
def test_a_wrong_setting_is_answered_with_its_name_and_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        AllocConf.parse(text)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("requested", "block"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MiB + 1, MiB + 512)])
def test_sizes_are_rounded_to_512_bytes(requested: int, block: int) -> None:
    assert AllocConf().round_size(requested) == block


@pytest.mark.parametrize(
    ("requested", "block"),
    [
        (1200, 1536),  # not above 4 x 512: rounded to 512 as usual
        (2049, 2560),  # 2048..4096 in steps of 512
        (5 * KiB, 5 * KiB),  # 4096..8192 in steps of 1024
        (5 * KiB + 1, 6 * KiB),
        (9 * MiB, 10 * MiB),  # 8..16 MiB in steps of 2
        (16 * MiB, 16 * MiB),
        (7 * MiB + 1, 8 * MiB),
    ],
)
def test_one_number_of_divisions_holds_for_every_size(requested: int, block: int) -> None:
    assert AllocConf.parse("roundup_power2_divisions:4").round_size(requested) == block


def test_a_list_of_divisions_holds_per_power_of_two() -> None:
    conf = AllocConf.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")

    assert conf.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert conf.divisions(100 * MiB) == 1
    assert conf.divisions(513 * MiB) == 2
    assert conf.round_size(513 * MiB) == 768 * MiB
    assert conf.round_size(1025 * MiB) == 1280 * MiB
    assert conf.round_size(2 * GiB + 1) == 2 * GiB + 256 * MiB


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (11 * MiB, 12 * MiB),
    ],
)
def test_segments_are_2_or_20_mib_or_made_to_measure(block: int, segment: int) -> None:
    assert AllocConf().segment_size(block) == segment
