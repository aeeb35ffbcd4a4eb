"""What is said of images while they are pulled and built."""

import re

import pytest

from sandboxes.docker.image.work import LONGEST, ImageWork, PulledLayers


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


def test_of_a_pull_the_layers_that_have_begun_are_counted() -> None:
    layers = PulledLayers()

    def said(status: str, layer: str = "a", **detail: int) -> str:
        return layers.after({"status": status, "id": layer, "progressDetail": detail})

    assert said("Pulling fs layer") == said("Download complete") == layers.after({"status": "Pulling from deb"}) == ""
    assert re.fullmatch(r"30 of 100 MB, \d+ s left", said("Downloading", current=30_000_000, total=100_000_000))
    assert said("Downloading", "b", current=10_000_000, total=100_000_000).startswith("40 of 200 MB")
    assert said("Download complete").startswith("110 of 200 MB")
    assert said("Extracting", current=1, total=9).startswith("110 of 200 MB")
    assert said("Pull complete", "b") == "200 of 200 MB, 0 s left"
