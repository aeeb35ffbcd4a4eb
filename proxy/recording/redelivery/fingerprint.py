"""The fingerprint of a request, by which a retry is recognised. Nothing about sessions or clients enters it."""

from hashlib import blake2b

import msgspec

from proxy.call import Call
from proxy.prompt.splice import Prompt


def request_fingerprint(call: Call, prompt: Prompt) -> bytes:
    """Digest everything that decides the answer except its length limit: 16 bytes, equal in every dialect and proxy.

    The prompt enters as the recorded completion whose path it begins with and the text behind that path.
    """
    ids, base = call.prompt if isinstance(call.prompt, tuple) else (), prompt.base.id if prompt.base else None
    form = call.constraint and (call.constraint.schema, call.constraint.calls, call.constraint.once)
    parameters = sorted(call.sampling.items())
    wishes = (call.single_call, call.logprobs, *(["no calls"] if call.no_calls else []))
    rest = msgspec.json.encode((ids, base, call.tools, call.stop, parameters, form, *wishes))
    state = blake2b(prompt.text.encode("utf-8", "surrogatepass"), digest_size=16)
    state.update(b"\0" + rest)
    return state.digest()
