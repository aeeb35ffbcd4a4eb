"""Qwen3-MoE written out in double precision, one sequence at a time, with the router's experts or given ones."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Reference:
    """The model of a Hugging Face directory; every layer is a mixture, weights of the chosen experts sum to 1."""

    def __init__(self, directory: Path):
        self.config = json.loads((directory / "config.json").read_text())
        self._weights = {name: w.double() for name, w in load_file(directory / "model.safetensors").items()}

    def __call__(self, tokens: list[int], forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[tokens, vocabulary] logprobs and [tokens, layers, per token] the experts that its routers choose.

        `forced`: [tokens, layers, per token] which are taken instead, -1 where they are not.
        """
        hidden, chosen = self._weights["model.embed_tokens.weight"][tokens], []
        for layer in range(self.config["num_hidden_layers"]):
            place = f"model.layers.{layer}."
            hidden = hidden + self._attention(place + "self_attn.", self._norm(place + "input_layernorm", hidden))
            normed = self._norm(place + "post_attention_layernorm", hidden)
            mixed, own = self._mixture(place + "mlp.", normed, None if forced is None else forced[:, layer])
            hidden = hidden + mixed
            chosen.append(own)
        logits = self._norm("model.norm", hidden) @ self._weights["lm_head.weight"].T
        return logits.log_softmax(-1), torch.stack(chosen, dim=1)

    def _norm(self, name: str, hidden: Tensor) -> Tensor:
        scale = hidden.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return hidden * scale.rsqrt() * self._weights[name + ".weight"]

    def _attention(self, place: str, hidden: Tensor) -> Tensor:
        size, width = len(hidden), self.config["head_dim"]
        q, k, v = (
            (hidden @ self._weights[f"{place}{name}_proj.weight"].T).view(size, -1, width).transpose(0, 1)
            for name in "qkv"
        )
        q, k = (self._turned(self._norm(f"{place}{name}_norm", part)) for name, part in (("q", q), ("k", k)))
        shared = len(q) // len(k)
        scores = q @ k.repeat_interleave(shared, 0).mT / width**0.5
        scores = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -torch.inf)
        output = scores.softmax(-1) @ v.repeat_interleave(shared, 0)
        return output.transpose(0, 1).reshape(size, -1) @ self._weights[place + "o_proj.weight"].T

    def _turned(self, heads: Tensor) -> Tensor:
        width = heads.shape[-1]
        speeds = self.config["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(heads.shape[1], dtype=torch.float64), speeds).repeat(1, 2)
        first, second = heads.chunk(2, dim=-1)
        return heads * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def _mixture(self, place: str, hidden: Tensor, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = hidden @ self._weights[place + "gate.weight"].T
        own = scores.topk(self.config["num_experts_per_tok"]).indices
        taken = own if forced is None else torch.where(forced < 0, own, forced)
        shares = scores.gather(1, taken).softmax(-1)
        rows = []
        for token, state in enumerate(hidden):
            outputs = [self._expert(f"{place}experts.{expert}.", state) for expert in taken[token].tolist()]
            rows.append((shares[token, :, None] * torch.stack(outputs)).sum(0))
        return torch.stack(rows), own

    def _expert(self, place: str, state: Tensor) -> Tensor:
        gate, up, down = (self._weights[f"{place}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ state) * (up @ state))
