"""Qwen3-MoE from and to Hugging Face folders, a layer at a time."""

from __future__ import annotations

import functools
import json
import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jax_megamoe._check import float_dtype
from jax_megamoe.config import MoEConfig
from jax_megamoe.models.qwen3_moe.config import Qwen3MoEConfig, read_object
from jax_megamoe.models.qwen3_moe.layers import Remat, Runtime
from jax_megamoe.models.qwen3_moe.model import Qwen3MoE, make_runtime, shard_map
from jax_megamoe.models.qwen3_moe.parameters import (
    Parameter,
    layer_groups,
    parameters,
    partition_spec,
)
from jax_megamoe.models.qwen3_moe.safetensors_io import CODES, StoredTensor, read_header

Layout = Literal["per_expert", "fused"]

_log = logging.getLogger(__name__)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE_BYTES = 4 * 2**30

_TOP = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
# Two-dimensional tensors of a layer are [out, in] there and [in, out] here.
_LAYER = {
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "router": "mlp.gate.weight",
    **{f"{p}_proj": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkvo"},
    **{f"{p}_proj": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}
_EXPERTS = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
_FUSED_GATE_UP, _FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def load_hf(
    folder: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    param_dtype: Any = None,
    expert_axis: str = "expert",
    moe: MoEConfig = MoEConfig(),
    remat: Remat = "full",
    expert_bias: bool = False,
) -> Qwen3MoE:
    """Loads a Hugging Face folder straight onto the mesh.

    Takes one file or several with an index, and experts one by one (`mlp.experts.3.up_proj.weight`)
    or fused (`mlp.experts.gate_up_proj`); the keys decide. Each device's slices are read from the
    files, cast and placed, one layer after the other, so that the host never holds more than a
    layer. Logs "loaded N of N tensors" (level INFO).

    Args:
      folder: holds `config.json` and the safetensors files.
      mesh: where the model lies; None takes the mesh of `jax.set_mesh`, or else one device.
      dtype: compute format, bfloat16 or float32; None takes that of the checkpoint (float32 for
        float16, which the experts do not compute in).
      param_dtype: storage format; None is `dtype`. For training: `dtype=jnp.bfloat16,
        param_dtype=jnp.float32`.
      expert_axis, moe, remat, expert_bias: as in `Qwen3MoE`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a tensor is missing, unknown or of another shape, a file is cut short, or the
        weights are quantised; the message names it. Also for arguments, as `Qwen3MoE`.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_megamoe.models.qwen3_moe import (
      ...     Qwen3MoE, Qwen3MoEConfig, load_hf, save_hf
      ... )
      >>> config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=1)
      >>> model = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_hf(model, folder)
      ...     load_hf(folder).config == config
      True
    """
    folder = Path(folder)
    config = Qwen3MoEConfig.from_hf(folder)
    if dtype is None:
        dtype = "float32" if config.dtype == "float16" else config.dtype
    dtype = float_dtype("dtype", dtype)
    param_dtype = float_dtype("param_dtype", dtype if param_dtype is None else param_dtype)
    runtime = make_runtime(config, mesh, expert_axis, dtype, moe, remat)

    stored = _stored_tensors(folder)
    fused = any(key.endswith(_FUSED_GATE_UP) for key in stored)
    expected = tensor_shapes(config, "fused" if fused else "per_expert")
    _check(folder, stored, expected)
    reader = _Reader(config, stored, fused, param_dtype)

    arrays: dict[str, Any] = {
        name: _place(runtime, info, lambda index, key=_TOP[name]: reader.read(key, index))
        for name, info in parameters(config).items()
        if name in _TOP
    }
    arrays["layers"] = {
        i: _load_group(runtime, reader, i, param_dtype) for i in parameters(config)["layers"]
    }
    _log.info("loaded %d of %d tensors from %s", len(reader.seen), len(expected), folder)
    return Qwen3MoE(
        config,
        arrays=arrays,
        mesh=runtime.mesh,
        expert_axis=expert_axis,
        dtype=dtype,
        moe=moe,
        remat=remat,
        expert_bias=expert_bias,
    )


def save_hf(model: Qwen3MoE, folder: str | Path, *, layout: Layout = "per_expert") -> None:
    """Writes a folder that transformers and `load_hf` read, in the format of the parameters.

    The tensors are fetched from the mesh a layer at a time and spread over files of at most 4 GiB.
    With several processes all must call it; process 0 writes, and all return when it has.

    Args:
      model: the model; an `ExpertBias` has no place in a Qwen3-MoE and is left out, with a warning
        if it is not zero.
      folder: made if it does not exist; weights that are there already (`model*.safetensors`, the
        index) are removed.
      layout: "per_expert", as public checkpoints are, or "fused".

    Raises:
      ValueError: an unknown layout.

    Example:
      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_megamoe.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig, save_hf
      >>> config = Qwen3MoEConfig.preset("tiny", num_hidden_layers=1)
      >>> model = Qwen3MoE(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_hf(model, folder, layout="fused")
      ...     sorted(file.name for file in pathlib.Path(folder).iterdir())
      ['config.json', 'generation_config.json', 'model.safetensors']
    """
    if layout not in ("per_expert", "fused"):
        raise ValueError(f"layout is {layout!r}; it must be 'per_expert' or 'fused'")
    folder = Path(folder)
    arrays = model.arrays()
    dtype = np.dtype(arrays["embed_tokens"].dtype)
    config = model.config
    _warn_of_bias(arrays)

    tensors = _hf_tensors(model, arrays, layout)
    if jax.process_index() == 0:
        _write(folder, config, layout, dtype, tensors)
    else:
        for _ in tensors:  # takes part in the gathers
            pass
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"save_hf {folder}")


def _write(folder, config, layout, dtype, tensors) -> None:
    files = _split(tensor_shapes(config, layout), dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    for file, entries in files.items():
        # Contiguous: save_file writes the memory of a transposed view as it lies.
        tensors_of_file = {
            key: np.ascontiguousarray(a) for key, a in (next(tensors) for _ in entries)
        }
        assert {key: a.shape for key, a in tensors_of_file.items()} == entries
        save_file(tensors_of_file, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {key: file for file, entries in files.items() for key in entries}
        total = sum(_nbytes(s, dtype) for entries in files.values() for s in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    text = {**config.to_hf(), "torch_dtype": dtype.name}
    (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n")
    generation = {k: text[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def tensor_shapes(config: Qwen3MoEConfig, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint in the order it is written, with its shape."""
    table = parameters(config)
    shapes = {_TOP["embed_tokens"]: table["embed_tokens"].shape}
    for i, group in enumerate(layer_groups(config)):
        layer = {
            name: np.broadcast_to(np.float32(0), info.shape[1:])
            for name, info in table["layers"][i].items()
        }
        for number in range(group.first, group.first + group.count):
            shapes |= {key: a.shape for key, a in _to_hf(layer, number, layout)}
    shapes |= {_TOP[name]: table[name].shape for name in ("norm", "lm_head") if name in table}
    return shapes


def _to_hf(
    layer: dict[str, np.ndarray], number: int, layout: Layout
) -> Iterator[tuple[str, np.ndarray]]:
    """One layer's parameters under the names and in the orientation of a checkpoint."""
    prefix = f"model.layers.{number}."
    for name, value in layer.items():
        if name not in _EXPERTS:
            yield prefix + _LAYER[name], value.T
    if "w_gate" not in layer:
        return
    if layout == "fused":
        halves = [layer[name].transpose(0, 2, 1) for name in ("w_gate", "w_up")]
        yield prefix + _FUSED_GATE_UP, np.concatenate(halves, axis=1)
        yield prefix + _FUSED_DOWN, layer["w_down"].transpose(0, 2, 1)
        return
    for e in range(layer["w_gate"].shape[0]):
        for name, key in _EXPERTS.items():
            yield f"{prefix}mlp.experts.{e}.{key}.weight", layer[name][e].T


class _Reader:
    """Slices of parameters out of a checkpoint; remembers which tensors it has touched."""

    def __init__(self, config, stored: dict[str, StoredTensor], fused: bool, dtype):
        self.config, self.stored, self.fused, self.dtype = config, stored, fused, dtype
        self.seen: set[str] = set()

    def read(self, key, index, axes=None):
        """The slice `index` of a tensor, its dimensions then permuted."""
        self.seen.add(key)
        view = self.stored[key].read(index)
        view = view if axes is None else view.transpose(axes)
        return np.array(view, self.dtype, order="C")

    def read_layer(self, number, name, index):
        """The slice `index` of a parameter of one layer, [in, out] or [experts, in, out]."""
        prefix = f"model.layers.{number}."
        if name not in _EXPERTS:
            axes = tuple(reversed(range(len(index))))
            return self.read(prefix + _LAYER[name], index[::-1], axes)
        experts, rows, columns = index
        if self.fused:
            key = _FUSED_DOWN if name == "w_down" else _FUSED_GATE_UP
            if name != "w_down":
                inner = self.config.moe_intermediate_size
                start, stop, _ = columns.indices(inner)
                shift = inner if name == "w_up" else 0
                columns = slice(start + shift, stop + shift)
            return self.read(prefix + key, (experts, columns, rows), (0, 2, 1))
        return np.stack(
            [
                self.read(
                    f"{prefix}mlp.experts.{e}.{_EXPERTS[name]}.weight", (columns, rows), (1, 0)
                )
                for e in range(*experts.indices(self.config.num_experts))
            ]
        )


def _place(runtime: Runtime, info: Parameter, read) -> jax.Array:
    sharding = NamedSharding(runtime.mesh, partition_spec(info, runtime.mesh, runtime.expert_axis))
    return jax.make_array_from_callback(info.shape, sharding, read)


def _load_group(runtime: Runtime, reader: _Reader, i: int, dtype) -> dict[str, jax.Array]:
    """The stacked parameters of a layer group, filled in layer by layer."""
    group, table = layer_groups(runtime.config)[i], parameters(runtime.config)["layers"][i]
    specs = {
        name: partition_spec(info, runtime.mesh, runtime.expert_axis)
        for name, info in table.items()
    }
    one_layer = {name: PartitionSpec(*spec[1:]) for name, spec in specs.items()}

    def fill(stacks, layer, position):
        return {
            name: jax.lax.dynamic_update_index_in_dim(stacks[name], layer[name], position, 0)
            for name in stacks
        }

    fill = shard_map(runtime, fill, (specs, one_layer, PartitionSpec()), specs)
    fill = jax.jit(fill, donate_argnums=0)
    stacks = jax.jit(
        lambda: {name: jnp.zeros(info.shape, dtype) for name, info in table.items()},
        out_shardings={name: NamedSharding(runtime.mesh, spec) for name, spec in specs.items()},
    )()
    for position in range(group.count):
        layer = {
            name: jax.make_array_from_callback(
                info.shape[1:],
                NamedSharding(runtime.mesh, one_layer[name]),
                functools.partial(reader.read_layer, group.first + position, name),
            )
            for name, info in table.items()
        }
        stacks = jax.block_until_ready(fill(stacks, layer, np.int32(position)))
    return stacks


def _hf_tensors(
    model: Qwen3MoE, arrays: dict[str, Any], layout: Layout
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a checkpoint in the order of `tensor_shapes`, fetched layer by layer."""
    everywhere = NamedSharding(model.mesh, PartitionSpec())
    pick = jax.jit(lambda stack, i: stack[i], out_shardings=everywhere)

    whole = jax.jit(lambda array: array, out_shardings=everywhere)

    def fetch(name):
        return np.asarray(whole(arrays[name]))

    yield _TOP["embed_tokens"], fetch("embed_tokens")
    for i, group in enumerate(layer_groups(model.config)):
        names = parameters(model.config)["layers"][i]
        for position in range(group.count):
            layer = {n: np.asarray(pick(arrays["layers"][i][n], position)) for n in names}
            yield from _to_hf(layer, group.first + position, layout)
    for name in ("norm", "lm_head"):
        if name in arrays:
            yield _TOP[name], fetch(name)


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / _SINGLE).is_file():
        return read_header(folder / _SINGLE)
    index = folder / _INDEX
    if not index.is_file():
        raise FileNotFoundError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(map(_is_name, weight_map.values())):
        raise ValueError(
            f"{index}: weight_map is {_short(weight_map)}; it must be an object, from the name of "
            "each tensor to its file"
        )
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        tensors = read_header(folder / file)
        for key in tensors:
            if weight_map.get(key) != file:
                raise ValueError(
                    f"{folder / file} holds {key}, which {_INDEX} does not place there"
                )
        stored |= tensors
    for key, file in weight_map.items():
        if key not in stored:
            raise ValueError(f"{folder / file} has no tensor {key}, which {_INDEX} places there")
    return stored


def _check(folder: Path, stored: dict[str, StoredTensor], expected: dict[str, tuple[int, ...]]):
    for key, tensor in stored.items():
        if tensor.code not in CODES or "_scale" in key.rsplit(".", 1)[-1]:
            raise ValueError(
                f"{tensor.file}: {key} is {tensor.code}, of a quantised checkpoint; the weights "
                f"must be {', '.join(CODES)} and without scales"
            )
    missing = [key for key in expected if key not in stored]
    unknown = [key for key in stored if key not in expected]
    if missing or unknown:
        problems = [
            f"{what} {_some(keys)}"
            for what, keys in (("lacks", missing), ("has unknown", unknown))
            if keys
        ]
        raise ValueError(
            f"{folder} {' and '.join(problems)}: {len(expected) - len(missing)} of "
            f"{len(expected)} tensors are there"
        )
    for key, shape in expected.items():
        if stored[key].shape != shape:
            raise ValueError(
                f"{stored[key].file}: {key} has shape {stored[key].shape}; with this config.json "
                f"it must be {shape}"
            )


def _is_name(value) -> bool:
    return isinstance(value, str)


def _short(value, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[:most] + "..."


def _some(keys: list[str], most: int = 5) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


def _split(
    shapes: dict[str, tuple[int, ...]], dtype: np.dtype
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Spreads the tensors over files: file name -> tensor name -> shape."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for key, shape in shapes.items():
        if files[-1] and size + _nbytes(shape, dtype) > _FILE_BYTES:
            files.append({})
            size = 0
        files[-1][key] = shape
        size += _nbytes(shape, dtype)
    if len(files) == 1:
        return {_SINGLE: files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": f for i, f in enumerate(files)}


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _warn_of_bias(arrays: dict[str, Any]) -> None:
    for group in arrays["layers"].values():
        if "expert_bias" in group and np.asarray(group["expert_bias"]).any():
            warnings.warn(
                "expert_bias is not zero; a Qwen3-MoE checkpoint has no place for it, and without "
                "it the tokens are routed differently",
                stacklevel=3,
            )
            return
