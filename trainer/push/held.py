"""Engines that stay at an earlier version while an evaluation of it goes on (proxy/pool/training/evaluations.py)."""

from collections.abc import Mapping

import msgspec

from trainer.config import Push
from trainer.push.engine_group import EngineGroup
from trainer.push.target import PushTarget


def unknown(options: Push, held: Mapping[str, str]) -> list[str]:
    """Return the URLs of `held` that are not among the engines of a push, which therefore holds none of them."""
    known = {url.rstrip("/") for url in options.engines}
    return [url for url in held if url.rstrip("/") not in known]


def without_held(options: Push, held: Mapping[str, str], version: str) -> tuple[Push, dict[str, str]]:
    """Leave out of a push of `version` the engines that serve the earlier versions at which they are held.

    `held`: URL -> version. Return the push's options without the engines that evaluations hold at another version, and
    these engines. One engine at least is pushed to. Colocated engines are never held, since they give up their weights
    in every step.
    """
    wanted = {url.rstrip("/"): name for url, name in held.items() if name != version}
    engines = [PushTarget(url, options) for url in options.engines if url.rstrip("/") in wanted]
    if not engines or options.colocated or len(engines) == len(options.engines):
        return options, {}
    served = EngineGroup(engines).each(PushTarget.served)
    left = {engine.url: name for engine, name in served.items() if name == wanted[engine.url]}
    others = tuple(url for url in options.engines if url.rstrip("/") not in left)
    return msgspec.structs.replace(options, engines=others, quorum=min(options.quorum, len(others))), left
