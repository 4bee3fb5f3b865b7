"""The Qwen3-MoE port beside transformers itself, where torch and transformers are installed."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe.models.qwen3_moe import generate, load_hf, save_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    rope_theta=1e6,
    initializer_range=0.15,
    use_sliding_window=False,
)
CHANGES = {
    "mixed layers": dict(num_hidden_layers=6, mlp_only_layers=[1], decoder_sparse_step=2),
    "wide heads": dict(head_dim=32),
    "attention bias": dict(head_dim=16, attention_bias=True),
    "far positions": dict(head_dim=128),
}


def theirs(**changes):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**{**SIZES, **changes})
    model = transformers.Qwen3MoeForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize("name", CHANGES)
def test_logits_and_the_way_back(name, tmp_path):
    model = theirs(**CHANGES[name])
    model.save_pretrained(tmp_path / "theirs")
    length = 3001 if name == "far positions" else 16
    ids = np.random.default_rng(0).integers(0, 61, (1, length), np.int32)
    ours = load_hf(tmp_path / "theirs", dtype=jnp.float32)
    want = logits_of(model, ids)
    np.testing.assert_allclose(ours(ids)[:, -16:], want[:, -16:], rtol=0, atol=1e-4)

    for layout in ("per_expert", "fused"):
        save_hf(ours, tmp_path / layout, layout=layout)
        again, report = transformers.Qwen3MoeForCausalLM.from_pretrained(
            tmp_path / layout, output_loading_info=True, dtype=torch.float32
        )
        assert not any(report.values()), report
        for (key, a), b in zip(
            model.state_dict().items(), again.state_dict().values(), strict=True
        ):
            assert torch.equal(a, b), key


def test_masks_with_padding_anywhere(tmp_path):
    model = theirs()
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(2).integers(0, 61, (3, 12), np.int32)
    mask = np.ones_like(ids)
    mask[0, 4:6] = mask[1, :3] = mask[1, 10:] = 0
    with torch.no_grad():
        want = model(
            torch.from_numpy(ids.astype(np.int64)), attention_mask=torch.from_numpy(mask).long()
        ).logits.numpy()
    got = np.asarray(load_hf(tmp_path, dtype=jnp.float32)(ids, mask))
    np.testing.assert_allclose(got[mask == 1], want[mask == 1], rtol=0, atol=1e-4)


def test_greedy_tokens(tmp_path):
    model = theirs()
    model.save_pretrained(tmp_path)
    prompt = np.random.default_rng(1).integers(0, 61, (2, 7), np.int32)
    want = model.generate(
        torch.from_numpy(prompt.astype(np.int64)),
        attention_mask=torch.ones(2, 7, dtype=torch.long),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
    )
    tokens = generate(load_hf(tmp_path, dtype=jnp.float32), prompt, 8)
    np.testing.assert_array_equal(tokens, want[:, 7:].numpy())
