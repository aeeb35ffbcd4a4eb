"""A tiny Qwen3-MoE for tests: the tiny model's tokenizer and template, with a mixture of experts in every layer."""

import json
from pathlib import Path

from proxy.engine.tiny_model import TinySizes, make_tiny_model

EXPERTS, TOP_K, WIDTH = 8, 2, 32
SIZES = TinySizes(hidden=64, intermediate=WIDTH, heads=4, kv_heads=2, head_dim=16, init_std=0.2, tied=False)


def make_mixture(directory: Path) -> None:
    """Write the model. Its weights are large, so that experts matter; SGLang never ties the head in this family."""
    import torch  # a second of import that only tests with a model pay
    from safetensors.torch import load_file, save_file

    make_tiny_model(directory, seed=1, sizes=SIZES)
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config |= {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": WIDTH}
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.0}
    file.write_text(json.dumps(config, indent=2) + "\n")
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for layer in range(SIZES.layers):
        place = f"model.layers.{layer}.mlp"
        for name in ("gate_proj", "up_proj", "down_proj"):
            like = weights.pop(f"{place}.{name}.weight")
            for expert in range(EXPERTS):
                drawn = torch.randn(like.shape, generator=generator) * SIZES.init_std
                weights[f"{place}.experts.{expert}.{name}.weight"] = drawn
        weights[f"{place}.gate.weight"] = torch.randn(EXPERTS, SIZES.hidden, generator=generator) * SIZES.init_std
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
