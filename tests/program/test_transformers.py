"""Public families of models, made small: each becomes a program with eager's bits."""

import pytest
import torch

from tests.program.models import captured, eager, ids, state_of

transformers = pytest.importorskip("transformers")
VOCAB = 96
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "Llama": {},
    "Qwen3": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "_config": "Gemma3TextConfig"},
    "Mixtral": EXPERTS,
    "Mamba": {"state_size": 8, "expand": 2},
}
MORE = {
    "Bloom": {"n_head": 4, "n_layer": 2},
    "CodeGen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    "Cohere": {},
    "Cohere2": {"sliding_window": 8},
    "Falcon": {"alibi": False, "new_decoder_architecture": False},
    "FalconMamba": {"state_size": 8},
    "GPTNeo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "GPTBigCode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": {},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "Glm": {"head_dim": 8},
    "Granite": {},
    "GptOss": {**EXPERTS, "head_dim": 8, "sliding_window": 8},
    "Helium": {"head_dim": 8},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "Mistral": {"sliding_window": 8},
    "Nemotron": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8},
    "Olmoe": EXPERTS,
    "Persimmon": {},
    "Phi": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "Rwkv": {"attention_hidden_size": 32},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
    "XGLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
}


def small(name: str) -> torch.nn.Module:
    options = dict((MODELS | MORE)[name])
    kind = options.pop("_config", f"{name}Config")
    config = getattr(transformers, kind, None)
    model = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel", None)
    if config is None or model is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    return model(config(**(SMALL | options)))


def check(name: str) -> None:
    model = small(name)
    # Transformers' own mixtures run what its exporter path runs: set before, so that both sides compute the same.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    found, runnable = captured(model)
    assert found.differs == 0.0
    state = state_of(model)
    for rows in (1, 3) if found.program.batch is None else (found.program.batch,):
        tokens = ids(rows, 16, VOCAB)
        assert torch.equal(runnable.run(state, tokens), eager(model, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_a_family_gives_the_bits_of_eager(name):
    check(name)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_many_families_give_the_bits_of_eager(name):
    check(name)
