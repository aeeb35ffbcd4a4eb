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
    shown = said("Downloading", current=30_000_000, total=100_000_000)
    assert re.fullmatch(r"30 of 100 MB, \d+\.\d MB/s, \d+ s left", shown)
    assert said("Downloading", "b", current=10_000_000, total=100_000_000).startswith("40 of 200 MB")
    assert said("Download complete").startswith("110 of 200 MB")
    assert said("Extracting", current=1, total=9).startswith("110 of 200 MB")
    assert re.fullmatch(r"200 of 200 MB, \S+ MB/s, 0 s left", said("Pull complete", "b"))


def test_the_rate_of_a_pull_is_that_since_its_beginning() -> None:
    now = [0.0]
    layers = PulledLayers(lambda: now[-1])
    now.append(4.0)
    half = {"status": "Downloading", "id": "a", "progressDetail": {"current": 50_000_000, "total": 100_000_000}}
    assert layers.after(half) == "50 of 100 MB, 12.5 MB/s, 4 s left"


@pytest.mark.parametrize("line", ["Step {}/7 : RUN make", "#8 [{}/7] RUN make", "#12 [builder {}/7] RUN make"])
def test_a_build_shows_its_share_of_steps_and_a_rest_time_after_two(line: str) -> None:
    now = [0.0]
    work = ImageWork(lambda said: None, lambda: now[-1])
    with work.on("building") as step:
        step(line.format(1))
        assert str(work) == f"building: {line.format(1)} (0 s)"
        now.append(10.0)
        step(line.format(2))
        assert str(work) == f"building: {line.format(2)} (14% of its steps, 10 s)"
        now.append(20.0)
        step(line.format(3))
        now.append(25.0)
        assert str(work) == f"building: {line.format(3)} (29% of its steps, about 45 s left, 25 s)"
        now.append(90.0)  # longer than all the rest was to take
        assert str(work) == f"building: {line.format(3)} (29% of its steps, 90 s)"
