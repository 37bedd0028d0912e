"""A patched causal LM: the same loss and gradients as transformers' own, without its logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")

from prism_fast.integrations.transformers import causal_lm_loss, patch, unpatch  # noqa: E402

VOCAB, WIDTH, BATCH, LENGTH = 1031, 32, 3, 40
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def configuration(family: str):
    t = transformers
    if family == "gpt2":
        return t.GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1
        )
    if family == "qwen3":
        return t.Qwen3Config(**SMALL, head_dim=8)
    if family == "gemma2":  # caps its logits
        return t.Gemma2Config(**SMALL, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=1.5)
    if family == "mixtral":  # adds a load-balancing loss of its own
        return t.MixtralConfig(**SMALL, num_local_experts=3, output_router_logits=True, router_aux_loss_coef=0.5)
    return {"llama": t.LlamaConfig, "qwen2": t.Qwen2Config}[family](**SMALL, tie_word_embeddings=family == "llama")


def a_model(family: str, dtype=torch.float32, seed: int = 0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(configuration(family), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" not in name and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # far from uniform, so that a wrong loss shows
    return model.to(dtype).train()


def a_batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[0, 25:] = -100
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def loss_and_gradients(model, **kwargs):
    torch.manual_seed(3)  # dropout
    model.zero_grad()
    loss = model(**a_batch(), **kwargs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_has_the_same_loss_and_gradients(family):
    model = a_model(family)
    loss, grads = loss_and_gradients(model)
    fused_loss, fused = loss_and_gradients(patch(model))
    assert fused_loss.dtype == loss.dtype == torch.float32
    assert fused_loss.item() == pytest.approx(loss.item(), rel=2e-6)
    assert fused.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.allclose(fused[name], grad, rtol=1e-4, atol=2e-5 * grad.abs().max().item()), name


@pytest.mark.parametrize("family", ("gpt2", "llama", "qwen2"))
def test_gradient_accumulation_divides_by_all_items(family):
    model = a_model(family)
    loss, _ = loss_and_gradients(model, num_items_in_batch=torch.tensor(317))
    fused, _ = loss_and_gradients(patch(model), num_items_in_batch=torch.tensor(317))
    assert fused.item() == pytest.approx(loss.item(), rel=2e-6)


class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("family", ("gpt2", "llama", "qwen2"))
def test_a_patched_model_never_holds_its_logits(family):
    model = a_model(family)
    with Largest() as plain:
        loss_and_gradients(model)
    with Largest() as fused:
        loss_and_gradients(patch(model))
    assert plain.elements >= BATCH * LENGTH * VOCAB
    assert fused.elements <= 48 * VOCAB  # the loss's chunk of rows on a CPU; the rows here are 120


def test_evaluation_and_generation_are_as_they_were():
    model = a_model("llama").eval()
    batch = a_batch()
    with torch.no_grad():
        before = model(**batch)
        written = model.generate(batch["input_ids"][:1, :5], max_new_tokens=4, do_sample=False)
        patch(model)
        after = model(**batch)
        assert torch.equal(before.loss, after.loss) and torch.equal(before.logits, after.logits)
        assert torch.equal(written, model.generate(batch["input_ids"][:1, :5], max_new_tokens=4, do_sample=False))
    logits = model.train()(batch["input_ids"]).logits  # training without labels: a loss of the caller's own
    assert logits.shape == (BATCH, LENGTH, VOCAB)


def test_patching_twice_is_patching_once_and_can_be_taken_back():
    model = a_model("gpt2")
    loss, _ = loss_and_gradients(model)
    assert patch(patch(model)) is model
    assert model(**a_batch()).logits.shape == (BATCH, LENGTH, 0)
    unpatch(unpatch(model))
    assert model(**a_batch()).logits.shape == (BATCH, LENGTH, VOCAB)
    assert torch.equal(loss_and_gradients(model)[0], loss)
    assert "forward" not in vars(model.lm_head) and not any("prism_fast" in name for name in vars(model))


def test_a_step_that_fails_leaves_no_trace():
    model = patch(a_model("gpt2"))
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[VOCAB + 5]]), labels=torch.tensor([[0]]))
    assert model(a_batch()["input_ids"]).logits.shape[-1] == VOCAB


def test_a_model_whose_logits_are_scaled_after_the_head_is_refused():
    config = transformers.CohereConfig(**SMALL, logit_scale=0.0625)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="CohereForCausalLM: its logits differ"):
        patch(model)
    assert model.train()(**a_batch()).logits.shape[-1] == VOCAB


def test_what_is_not_a_causal_lm_with_a_linear_head_is_refused():
    with pytest.raises(TypeError, match="its head"):
        patch(torch.nn.Linear(2, 2))
    model = a_model("gpt2")
    model.loss_function = lambda **_: None
    with pytest.raises(TypeError, match="ForCausalLMLoss"):
        patch(model)


def test_the_loss_alone_takes_shifted_labels_or_shifts_them():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 6, 8), torch.randn(11, 8)
    labels = torch.randint(11, (2, 6))
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    expected = torch.nn.functional.cross_entropy((hidden @ weight.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    for loss in (causal_lm_loss(hidden, weight, labels), causal_lm_loss(hidden, weight, None, shift_labels=shifted)):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValueError, match="expected one of them"):
        causal_lm_loss(hidden, weight, None)
