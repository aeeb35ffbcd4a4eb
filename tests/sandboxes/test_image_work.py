"""What is said of images while they are pulled and built."""

import re

import pytest

from sandboxes.docker.image.work import LONGEST, ImageWork


def test_the_oldest_is_shown_with_its_step_and_its_seconds() -> None:
    said: list[str] = []
    work = ImageWork(said.append)
    assert str(work) == ""
    with work.on("building the image of t") as step:
        step("Step 1/2 : FROM deb:py")
        assert re.fullmatch(r"building the image of t: Step 1/2 : FROM deb:py \(\d s\)", str(work))
        with pytest.raises(ValueError), work.on("pulling image deb:py"):
            assert str(work).endswith(" and 1 other images")
            raise ValueError
        step("x" * 1000)
        assert len(str(work)) < LONGEST + 50
    assert str(work) == ""
    assert said[:3] == [
        "building the image of t",
        "building the image of t: Step 1/2 : FROM deb:py",
        "pulling image deb:py",
    ]
