"""Loading and saving Hugging Face folders: layouts, errors that name the tensor, memory, meshes."""

import dataclasses
import json
import logging
import shutil
import tracemalloc
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType

from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, load_hf, save_hf
from jax_megamoe.models.qwen3_moe import checkpoint as checkpoint_module
from jax_megamoe.models.qwen3_moe.safetensors_io import read_header

DATA = Path(__file__).parent / "data" / "qwen3_moe"


def tensors(folder):
    """Every tensor of a folder, read by the safetensors library."""
    files = sorted(folder.glob("*.safetensors"))
    return {k: v for file in files for k, v in safetensors.numpy.load_file(file).items()}


def rewrite(source, folder, change):
    """A copy of a one-file checkpoint after `change(dict of its tensors)`."""
    shutil.copytree(source, folder)
    content = tensors(folder)
    change(content)
    safetensors.numpy.save_file(content, folder / "model.safetensors")
    return folder


def arrays_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.arrays(), b.arrays())


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
@pytest.mark.parametrize("case", ["base", "tied_dense", "sharded"])
def test_saved_folder_holds_the_bits_that_were_loaded(case, layout, tmp_path, monkeypatch):
    if case == "sharded":
        monkeypatch.setattr(checkpoint_module, "_FILE_BYTES", 100_000)
    other = {"per_expert": "fused", "fused": "per_expert"}[layout]
    model = load_hf(DATA / case / other)
    save_hf(model, tmp_path / "saved", layout=layout)
    want, got = tensors(DATA / case / layout), tensors(tmp_path / "saved")
    assert got.keys() == want.keys()
    for key in want:
        assert got[key].dtype == want[key].dtype
        np.testing.assert_array_equal(got[key], want[key], err_msg=key)
    if case == "sharded":
        index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
        files = set(index["weight_map"].values())
        assert len(files) > 1 and files == {p.name for p in tmp_path.glob("saved/*.safetensors")}
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in want.values())
    again = load_hf(tmp_path / "saved")
    assert again.config == dataclasses.replace(model.config)
    arrays_equal(again, model)


def test_bf16_is_saved_as_bf16_in_place_of_older_weights(tmp_path):
    shutil.copytree(DATA / "sharded" / "fused", tmp_path, dirs_exist_ok=True)
    model = load_hf(DATA / "base" / "per_expert_bf16")
    save_hf(model, tmp_path)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    header = read_header(tmp_path / "model.safetensors")
    assert {t.code for t in header.values()} == {"BF16"}
    want = read_header(DATA / "base" / "per_expert_bf16" / "model.safetensors")
    for key in want:
        np.testing.assert_array_equal(header[key].read(), want[key].read())
    assert load_hf(tmp_path).config.dtype == "bfloat16"


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_gate_and_up_rows_stay_in_order(layout, tmp_path):
    # Distinct rows, so that swapped or interleaved halves give other numbers.
    config = Qwen3MoEConfig.preset(
        "tiny",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
    )
    gate = np.arange(1, 5, dtype=np.float32)[:, None] * np.ones((4, 8), np.float32)
    up = 10 * gate
    content = {
        key: np.zeros(shape, np.float32)
        for key, shape in checkpoint_module.tensor_shapes(config, layout).items()
    }
    prefix = "model.layers.0.mlp.experts."
    if layout == "fused":
        content[prefix + "gate_up_proj"][:] = np.concatenate([gate, up])
        content[prefix + "down_proj"][:] = np.eye(8, 4)
    else:
        for e in range(2):
            content[f"{prefix}{e}.gate_proj.weight"][:] = gate
            content[f"{prefix}{e}.up_proj.weight"][:] = up
            content[f"{prefix}{e}.down_proj.weight"][:] = np.eye(8, 4)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    safetensors.numpy.save_file(content, tmp_path / "model.safetensors")

    model = load_hf(tmp_path)
    np.testing.assert_array_equal(model.layers[0].w_gate[0, 0], gate.T)
    np.testing.assert_array_equal(model.layers[0].w_up[0, 1], up.T)
    x = np.full((1, 8), 0.01, np.float32)
    w = [np.asarray(getattr(model.layers[0], n)[0, 0]) for n in ("w_gate", "w_up", "w_down")]
    y = (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2]
    g, u = 0.08 * np.arange(1, 5), 0.8 * np.arange(1, 5)
    want = g / (1 + np.exp(-g)) * u
    np.testing.assert_allclose(y[0], [*want, 0, 0, 0, 0], rtol=1e-5)
    swapped = u / (1 + np.exp(-u)) * g
    assert np.linalg.norm(swapped - want) > 0.1 * np.linalg.norm(want)

    save_hf(model, tmp_path / "saved", layout=layout)
    for key, value in tensors(tmp_path / "saved").items():
        np.testing.assert_array_equal(value, content[key])


PER_EXPERT, FUSED = "model.layers.1.mlp.experts.5.up_proj.weight", "mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "layout, change, message",
    [
        ("per_expert", lambda t: t.pop(PER_EXPERT), f"lacks {PER_EXPERT}: 101 of 102"),
        ("fused", lambda t: t.pop(f"model.layers.2.{FUSED}"), f"lacks model.layers.2.{FUSED}"),
        ("per_expert", lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
        (
            "per_expert",
            lambda t: t.update({"model.extra.weight": np.zeros(1, np.float32)}),
            "has unknown model.extra.weight",
        ),
        (
            "per_expert",
            lambda t: t.update({PER_EXPERT.replace("up_proj", "w3"): t.pop(PER_EXPERT)}),
            f"lacks {PER_EXPERT} and has unknown model.layers.1.mlp.experts.5.w3.weight",
        ),
        (
            "fused",
            lambda t: t.update({PER_EXPERT: np.zeros((24, 32), np.float32)}),
            f"has unknown {PER_EXPERT}",
        ),
        (
            "per_expert",
            # Right size, wrong orientation: never guessed from the shape.
            lambda t: t.update({PER_EXPERT: np.ascontiguousarray(t[PER_EXPERT].T)}),
            rf"{PER_EXPERT} has shape \(32, 24\).*must be \(24, 32\)",
        ),
        (
            "per_expert",
            lambda t: t.update({PER_EXPERT: t[PER_EXPERT].astype(ml_dtypes.float8_e4m3fn)}),
            f"{PER_EXPERT} is F8_E4M3, of a quantised checkpoint",
        ),
        (
            "per_expert",
            lambda t: t.update({PER_EXPERT + "_scale_inv": np.ones((1, 1), np.float32)}),
            f"{PER_EXPERT}_scale_inv is F32, of a quantised checkpoint.*without scales",
        ),
        (
            "per_expert",
            lambda t: t.update({PER_EXPERT: t[PER_EXPERT].astype(np.int32)}),
            f"{PER_EXPERT} is I32",
        ),
    ],
)
def test_every_tensor_that_does_not_fit_is_named(layout, change, message, tmp_path):
    folder = rewrite(DATA / "base" / layout, tmp_path / "model", change)
    with pytest.raises(ValueError, match=message):
        load_hf(folder)


def test_missing_and_broken_files_are_named(tmp_path):
    folder = shutil.copytree(DATA / "sharded" / "per_expert", tmp_path / "model")
    second = folder / "model-00002-of-00002.safetensors"
    content = second.read_bytes()

    second.unlink()
    with pytest.raises(FileNotFoundError, match=second.name):
        load_hf(folder)
    second.write_bytes(content[:-4])
    with pytest.raises(ValueError, match=f"{second.name} is not a whole safetensors file"):
        load_hf(folder)
    second.write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match=f"{second.name} is not a whole safetensors file"):
        load_hf(folder)

    second.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    kept = dict(table["weight_map"])
    table["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(ValueError, match="model.norm.weight"):
        load_hf(folder)
    table["weight_map"] = {**kept, "model.phantom.weight": second.name}
    index.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=f"{second.name} has no tensor model.phantom.weight"):
        load_hf(folder)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "holds a list; it must hold a JSON object"),
        ("{}", "weight_map is None; it must be an object"),
        ('{"weight_map": {"a": 3}}', "weight_map is {'a': 3}; it must be an object"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=f"{index.name}.* {message}"):
            load_hf(folder)
    index.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_hf(folder)


@pytest.mark.parametrize("layout, count", [("per_expert", 102), ("fused", 36)])
def test_every_tensor_is_read_and_reported(layout, count, caplog):
    with caplog.at_level(logging.INFO, logger="jax_megamoe"):
        model = load_hf(DATA / "base" / layout)
    assert f"loaded {count} of {count} tensors" in caplog.text
    for path, value in jax.tree_util.tree_leaves_with_path(model.arrays()):
        fresh = 1.0 if "norm" in str(path[-1]) else 0.0
        assert not np.all(np.asarray(value) == fresh, axis=-1).any(), path


@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_host_memory_while_loading_is_bounded(tmp_path, layout):
    config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=12, mlp_only_layers=(3,))
    model = Qwen3MoE(config, rngs=nnx.Rngs(0))
    limit = 2 * 2**20
    before, checkpoint_module._FILE_BYTES = checkpoint_module._FILE_BYTES, limit
    try:
        save_hf(model, tmp_path, layout=layout)
    finally:
        checkpoint_module._FILE_BYTES = before
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    one_layer = sum(a[0].nbytes for a in model.arrays()["layers"][0].values())
    assert total > 3 * (2 * limit + one_layer)

    del model
    tracemalloc.start()  # numpy's buffers are counted, those of jax are not
    loaded = load_hf(tmp_path, mesh=jax.make_mesh((2, 4), ("data", "expert")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(loaded.layers) == 3
    assert peak < 2 * limit + one_layer


def test_load_on_one_mesh_and_save_from_another(tmp_path):
    devices = np.array(jax.devices())
    auto = (AxisType.Auto,) * 2
    meshes = [
        jax.make_mesh((2, 4), ("data", "expert")),
        jax.make_mesh((4, 2), ("expert", "data"), axis_types=auto),
        jax.sharding.Mesh(devices[::-1].reshape(1, 8), ("data", "expert")),
        jax.sharding.Mesh(devices[[2, 0, 3, 1]].reshape(2, 2), ("data", "expert")),
    ]
    folder = DATA / "base" / "fused"
    want = load_hf(folder)
    for i, mesh in enumerate(meshes):
        model = load_hf(folder, mesh=mesh)
        arrays_equal(model, want)
        for name in ("w_gate", "w_up", "w_down"):
            w = getattr(model.layers[0], name)[...]
            local = w.addressable_shards[0].data.shape[1]
            assert local <= 8 // mesh.shape["expert"]
        assert model.embed_tokens.sharding.mesh == mesh
        folder = tmp_path / str(i)
        save_hf(model, folder, layout=("per_expert", "fused")[i % 2])
    arrays_equal(load_hf(folder), want)


def test_formats_of_compute_and_storage():
    folder = DATA / "base" / "per_expert_bf16"
    for options, compute, storage in [
        ({}, jnp.bfloat16, jnp.bfloat16),
        ({"dtype": jnp.float32}, jnp.float32, jnp.float32),
        ({"dtype": jnp.bfloat16, "param_dtype": jnp.float32}, jnp.bfloat16, jnp.float32),
    ]:
        model = load_hf(folder, **options)
        assert model.runtime.dtype == compute
        assert {a.dtype for a in jax.tree.leaves(model.arrays())} == {jnp.dtype(storage)}


@pytest.mark.parametrize("stored, other", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_saved_folder_says_the_format_of_its_tensors(tmp_path, stored, other):
    """Whatever the configuration says of the checkpoint that it came from."""
    config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=1, dtype=other)
    model = Qwen3MoE(config, rngs=nnx.Rngs(0), param_dtype=stored)
    save_hf(model, tmp_path)
    again = load_hf(tmp_path)
    assert again.config.dtype == stored
    arrays_equal(again, model)


def test_float16_checkpoint_is_computed_in_float32(tmp_path):
    def halve(content):
        content.update({key: value.astype(np.float16) for key, value in content.items()})

    folder = rewrite(DATA / "base" / "fused", tmp_path / "model", halve)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    model = load_hf(folder)
    assert model.runtime.dtype == jnp.float32
    np.testing.assert_array_equal(
        model.lm_head[...], tensors(folder)["lm_head.weight"].astype(np.float32)
    )
    with pytest.raises(ValueError, match="dtype is float16; it must be bfloat16 or float32"):
        load_hf(folder, dtype=jnp.float16)


def test_a_bias_that_cannot_be_saved_is_not_lost_silently(tmp_path):
    model = load_hf(DATA / "base" / "fused", expert_bias=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_hf(model, tmp_path)
    model.layers[0].expert_bias[...] = model.layers[0].expert_bias[...].at[1, 2].set(0.5)
    with pytest.warns(UserWarning, match="expert_bias is not zero"):
        save_hf(model, tmp_path)


def test_unknown_layout_and_meshes_that_do_not_fit():
    folder = DATA / "base" / "fused"
    with pytest.raises(ValueError, match="layout is 'split'.*'per_expert' or 'fused'"):
        save_hf(load_hf(folder), "unused", layout="split")
    with pytest.raises(
        ValueError, match="expert_axis is 'ep'; the axes of the mesh are 'data', 'e"
    ):
        load_hf(folder, mesh=jax.make_mesh((1, 2), ("data", "expert")), expert_axis="ep")
    with pytest.raises(TypeError, match="mesh is a tuple; it must be a jax.sharding.Mesh"):
        load_hf(folder, mesh=(2, 2))
    with pytest.raises(ValueError, match="num_experts is 6.*multiple.*'expert', 4"):
        load_hf(DATA / "tied_dense" / "fused", mesh=jax.make_mesh((1, 4), ("data", "expert")))
    with pytest.raises(ValueError, match="remat is 'some'"):
        load_hf(folder, remat="some")
    for name, value, seen in (
        ("dtype", "bf16", "'bf16'"),
        ("param_dtype", jnp.int32, "int32"),
        ("param_dtype", jnp.float16, "float16"),
    ):
        with pytest.raises(ValueError, match=f"^{name} is {seen}; it must be bfloat16 or float32"):
            load_hf(folder, **{name: value})
        with pytest.raises(ValueError, match=f"^{name} is {seen}; it must be bfloat16 or float32"):
            Qwen3MoE(Qwen3MoEConfig.preset("tiny"), rngs=nnx.Rngs(0), **{name: value})
    with pytest.raises(TypeError, match="config is a str; it must be a jax_megamoe.MoEConfig"):
        load_hf(folder, moe="xla")
    with pytest.raises(TypeError, match="expert_axis is None; it must be the name of a mesh axis"):
        load_hf(folder, expert_axis=None)
    with pytest.raises(ValueError, match="exactly one of rngs and arrays"):
        Qwen3MoE(Qwen3MoEConfig.preset("tiny"))


def test_mesh_of_set_mesh_is_used():
    mesh = jax.make_mesh((2, 2), ("data", "expert"))
    with jax.set_mesh(mesh):
        assert load_hf(DATA / "base" / "fused").mesh == mesh
