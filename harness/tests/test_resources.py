"""Peak memory is in bytes and keeps the peak; work that does not fit is told before it starts."""

from pathlib import Path

import numpy as np
import pytest

from harness import resources
from harness.errors import UnjudgedError
from harness.resources import Mode, available_memory_bytes, free_disk_bytes, peak_memory_bytes, require

MB = 1 << 20


def test_peak_remembers_what_was_freed() -> None:
    before = peak_memory_bytes()
    block = np.ones(before + 64 * MB, np.uint8)
    assert block[-1] == 1
    del block
    after = peak_memory_bytes()
    assert after >= before + 60 * MB
    assert 10 * MB < before < after < 64 * 1024 * MB


WIDE, NARROW = Mode("make wide", 9_000_000_000, 4_000_000_000), Mode("make narrow", 2_000_000_000, 1_000_000_000)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "free_disk_bytes", lambda folder: 8_000_000_000)
    monkeypatch.setattr(resources, "available_memory_bytes", lambda: 3_000_000_000)


@pytest.mark.usefixtures("machine")
def test_what_does_not_fit_is_told_with_the_figures_and_the_mode_that_fits(tmp_path: Path) -> None:
    require(NARROW, (), tmp_path)
    with pytest.raises(UnjudgedError) as caught:
        require(WIDE, [WIDE, NARROW], tmp_path)
    assert str(caught.value) == (
        "make wide needs 9.0 GB of disk, but 8.0 GB are free; and 4.0 GB of memory, but 3.0 GB are free; "
        "free some, or take another mode: this mode fits: make narrow"
    )


@pytest.mark.usefixtures("machine")
def test_where_nothing_fits_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnjudgedError, match=r"no narrower mode fits$"):
        require(WIDE, [WIDE], tmp_path)


def test_figures_of_this_machine(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "not" / "there") > MB
    assert available_memory_bytes() > MB


def test_the_limit_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    before = available_memory_bytes()
    for name, text in (("max", "9000000\n"), ("current", "8000000\n"), ("stat", "anon 6\nfile 500000\n")):
        (tmp_path / f"memory.{name}").write_text(text, encoding="utf-8")
    assert available_memory_bytes() == 1_500_000 < before
    (tmp_path / "memory.max").write_text("max\n", encoding="utf-8")
    assert available_memory_bytes() > 1_500_000
