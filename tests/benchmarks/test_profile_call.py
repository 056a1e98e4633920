"""How a call's GPU events are listed, and what is said of them."""

import pytest

from benchmarks.profile_call import listed, parse, verify

ONE, APART = [("decode_kernel", 100.0, 120.0)], [("decode_kernel", 100.0, 120.0), ("decode_kernel", 121.0, 140.0)]
OVERLAPPING = [("decode_kernel", 118.5, 140.0), ("decode_kernel", 100.0, 120.0)]


def test_events_count_from_the_first_and_overlap_what_has_not_ended():
    assert listed(OVERLAPPING) == [
        {"name": "decode_kernel", "start_us": 0.0, "us": 20.0, "overlaps": False},
        {"name": "decode_kernel", "start_us": 18.5, "us": 21.5, "overlaps": True},
    ]
    inside = [("a", 0.0, 10.0), ("b", 1.0, 2.0), ("c", 5.0, 6.0), ("d", 10.0, 11.0)]
    assert [event["overlaps"] for event in listed(inside)] == [False, True, True, False]
    assert listed([]) == []


def test_only_what_the_page_says_passes():
    verify(listed(ONE), 1, True)
    verify(listed(OVERLAPPING), 2, True)
    verify(listed(APART), 2, False)
    with pytest.raises(ValueError, match="expected calls that overlap where programmatic launch works"):
        verify(listed(APART), 2, True)
    for spans in ([], [*ONE, ("Memset (Device)", 90.0, 91.0)], APART, [("shrink_kernel", 1.0, 2.0)]):
        with pytest.raises(ValueError, match="expected one decode_kernel for each of 1 calls"):
            verify(listed(spans), 1, False)


def test_tokens_are_the_decode_paths(capsys):
    assert parse(["--tokens", "32", "--adapters", "4"]).tokens == 32
    with pytest.raises(SystemExit):
        parse(["--tokens", "65"])
    assert "--tokens: expected 1 to 64" in capsys.readouterr().err
