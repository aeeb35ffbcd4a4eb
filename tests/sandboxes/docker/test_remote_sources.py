"""What a Dockerfile lets the daemon fetch: public addresses only, and none that is not known before."""

import pytest

from sandboxes.docker.image.remote_sources import forbidden_source


@pytest.mark.parametrize(
    "lines",
    [
        "ADD http://169.254.169.254/latest/meta-data /x",
        "add --chown=1:1 --link http://[fd00:ec2::254]/ /x",
        "ONBUILD ADD http://10.0.0.1/file /x",
        "ADD a.txt \\\n  # a comment\n  http://192.168.0.1/b /x/",
        "# escape=`\nFROM x\nADD a `\n http://127.0.0.1/ /x/",
        'ADD ["https://localhost/x", "/x"]',
        "ADD git@10.0.0.1:a/b.git /x",
        "ADD http://2130706433/ /x",
        "ADD http:\\//10.0.0.1/ /x",
        'ADD http:"//"10.0.0.1/ /x',
        "ADD http:\\\n//169.254.169.254/latest/meta-data/ /x",
        "ADD a \\\n\n http://169.254.169.254/latest/ /x",
        "ADD a \\\r\n\r\n http://169.254.169.254/latest/ /x",
        "AD\\\nD http://169.254.169.254/ /x",
        "# c\n# escape=`\nFROM x\nADD http:\\\n//169.254.169.254/ /x",
        "# escape=`\nFROM x\nADD http:`//169.254.169.254/ /x",
        "RUN echo \\\\\nADD http://169.254.169.254/ /x",
        "ADD a\fhttp://169.254.169.254/ /x",
        "ADD a\rhttp://169.254.169.254/ /x",
        "ADD a \\\n\x1c# http://169.254.169.254/ /x",
        r'ADD --chown="1 1" ["http:\u002f\u002f10.0.0.1/x", "/x"]',
        r'ADD ["http:\u002f\u002f10.0.0.1/x", "/x"] more',
        'ADD -- ["http://10.0.0.1/x","/x"]',
    ],
)
def test_a_private_source_is_refused(lines: str) -> None:
    assert "is private or near, where builds do not reach; copy the file instead" in forbidden_source(lines)


def test_an_unknown_source_is_refused_and_this_machines_addresses_count() -> None:
    assert "what a variable stands for is not known before" in forbidden_source("ARG U\nADD $U /x")
    assert "what a variable stands for is not known before" in forbidden_source("ADD https://$HOST/ /x")
    assert "what a variable stands for is not known before" in forbidden_source("ENV X=ttp://10.0.0.1\nADD h${X}/ /x")
    assert "its host cannot be looked up" in forbidden_source("ADD http://nowhere.invalid/ /x")
    for words in ("http://192.0.32.8/ /x", '["http://192.0.32.8/", "a", "/x"]', "--chown=$U:$U http://192.0.32.8/ /x"):
        assert forbidden_source(f"ADD {words}") == ""
    assert "is private or near" in forbidden_source("ADD http://192.0.32.8/ /x", ["192.0.32.8"])


@pytest.mark.parametrize(
    "lines", ["ADD a b /x/", "ADD ./$FILE /x", "RUN curl http://10.0.0.1 -o /x", "COPY http:// /x", "# ADD $U /x"]
)
def test_files_of_the_context_are_not_looked_at(lines: str) -> None:
    assert forbidden_source(lines) == ""
