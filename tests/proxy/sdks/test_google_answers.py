"""google-genai's own client parses an answer of a schema, reads logprobs, streamed and not, and gets the model."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.conftest import need
from tests.proxy.conftest import Serve
from tests.proxy.sdks import environments


@pytest.mark.long
async def test_its_client_reads_schemas_and_logprobs(serve: Serve) -> None:
    python = environments.made("google_genai")
    need("google-genai (python -m tests.proxy.sdks.environments google_genai)", python is not None)
    stand = await serve(lambda prompt, ids: '{"title": "hello"}', prescribed="prefill")
    script = Path(__file__).parent / "google_answers.py"
    running = await asyncio.create_subprocess_exec(str(python), str(script), stand.url, stdout=asyncio.subprocess.PIPE)
    answer = msgspec.json.decode((await running.communicate())[0])
    assert answer["parsed"] == "hello" and answer["average"] == 0
    assert answer["limit"] == 40960
    assert "".join(token for token, _, _ in answer["whole"]) == '{"title": "hello"}'
    assert answer["whole"] == answer["streamed"] and all(rest == [0, 1] for _, *rest in answer["whole"])
    assert [row.misfit for row in stand.recorded()] == ["", ""]
